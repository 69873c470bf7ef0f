"""Delete the files and the sections of pages that were not asked for and what a run in place has left, then say what to
do next.

Running this script twice does the same as running it once. It uses the standard library only.
"""

import json
import re
import shutil
import tempfile
from pathlib import Path

answers = json.loads(r"""{{ cookiecutter | tojson }}""")

KEEP = [
    ({"tools": ["all"]}, "convert.py diagnose.py predict.py report.py"),
    ({"tools": ["all"]}, "fastgpu/convert fastgpu/diagnose fastgpu/predict fastgpu/report fastgpu/process/tools.py"),
    (
        {"tools": ["all"]},
        "docs/data.md docs/python.md docs/measuring.md docs/troubleshooting.md docs/why-is-my-gpu-idle.md",
    ),
    ({"tools": ["all"]}, "docs/pictures/tensorboard.png"),
    ({"tools": ["all"]}, "docs/tutorial.md docs/ko"),
    ({"launch": ["slurm", "kubernetes", "both"]}, "launch docs/clusters.md"),
    ({"launch": ["slurm", "both"]}, "launch/slurm.sh"),
    ({"launch": ["kubernetes", "both"]}, "launch/kubernetes.yaml launch/Dockerfile launch/Dockerfile.dockerignore"),
    ({"workload": ["images", "both", "own"]}, "data/digits.h5"),
    ({"workload": ["images", "recsys", "both"]}, "configs"),
    ({"workload": ["images", "both"]}, "configs/celeba.yaml configs/cifar10.yaml"),
    ({"workload": ["images", "both"]}, "configs/photos.yaml configs/imagenet.yaml"),
    ({"workload": ["images", "both"]}, "workloads/images.py fastgpu/images"),
    ({"workload": ["images", "both"]}, "fastgpu/convert/images"),
    ({"tools": ["all"], "workload": ["images", "both"]}, "fastgpu/imagefiles"),
    ({"workload": ["recsys", "both"]}, "configs/recsys.yaml data/interactions-train.h5 data/interactions-val.h5"),
    ({"workload": ["recsys", "both"]}, "workloads/recsys.py fastgpu/convert/recsys"),
]
"""({question: answers that keep them}, paths): no other project has these files and folders."""
FACTS = {
    "images": answers["workload"] in ("images", "both"),
    "recsys": answers["workload"] in ("recsys", "both"),
    "own": answers["workload"] == "own",
    "digits": answers["workload"] != "recsys",
    "tools": answers["tools"] == "all",
    "launch": answers["launch"] != "none",
    "slurm": answers["launch"] in ("slurm", "both"),
    "kubernetes": answers["launch"] in ("kubernetes", "both"),
}
"""What a page may ask by `<!-- only: tools images or own -->`; `no-tools` asks for the opposite."""
SECTION = re.compile(r"(?ms)(^)?<!-- only: ([^>]+) -->(?(1)\n)((?:(?!<!-- only:).)*?)<!-- end -->(?(1)\n)")
"""An innermost section: whole lines if its comment begins a line, else a part of a sentence, list or table."""
TEMPLATE = "https://github.com/org/fastgpu-template"
"""Stands in pages and in pyproject.toml for the address that this project was made from."""
HOSTS = {"gh": "github.com", "gl": "gitlab.com", "bb": "bitbucket.org"}
"""Cookiecutter's short forms."""
INSTALL = ".[dev,convert]"
NO_CONVERT = "#          This project has no convert.py. A project that was made with tools=all has it.\n"
"""For recipes of a project without tools."""
NUMBERS = re.compile(r"(?m)^<!-- numbers: .*\n")
"""Says which numbers of the template's benchmarks fill the table below."""
LEFTOVERS = [
    ".venv",
    "runs",
    "build",
    "*.egg-info",
    ".hypothesis",
    ".coverage",
    "**/__pycache__",
    "**/*.py[co]",
    "**/.*_cache",
    "**/.DS_Store",
]


def remove(path: Path) -> None:
    """Delete a file or a folder, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def is_wanted(question: str) -> bool:
    """Whether this project has the sections behind a question."""
    words = [alternative.split() for alternative in question.split(" or ")]
    return any(all(FACTS[word.removeprefix("no-")] != word.startswith("no-") for word in each) for each in words)


def choose_sections(text: str) -> str:
    """A page without the sections of other projects, and without the comments around those of this one."""
    before = ""
    while text != before:  # sections stand in sections
        before = text
        text = SECTION.sub(lambda found: found[3] if is_wanted(found[2]) else "", text)
    return text


def web_address(template: str) -> str:
    """Of what cookiecutter was given, such as gh:me/template, without passwords; empty for a folder or a zip file."""
    host, _, path = template.partition(":")
    address = f"https://{HOSTS[host]}/{path}" if host in HOSTS else template
    found = re.fullmatch(r"https://(?:[^/@]*@)?([\w.:-]+(?:/[\w.~-]+?)+)(?:\.git)?/?", address)
    return f"https://{found[1]}" if found and not address.endswith(".zip") else ""


def name_template(text: str) -> str:
    """A page or pyproject.toml with the address of its template, or without links to it."""
    address = web_address(answers.get("_template", ""))
    if not address:
        text = re.sub(rf"\[([^\]]+)\]\({TEMPLATE}\)", r"\1", text)
        text = re.sub(rf"\[project\.urls\]\n.*{TEMPLATE}.*\n\n", "", text)
    text = text.replace(TEMPLATE, address)
    return text.replace(TEMPLATE.replace("https://github.com/", "gh:"), address or "path/to/fastgpu-template")


def name_tools(text: str) -> str:
    """A file that speaks of convert.py and its packages, in a project that may have been made without tools."""
    if FACTS["tools"]:
        return text
    text = re.sub(r"(?m)^(?:convert|export) = .*\n", "", text.replace(INSTALL, ".[dev]"))
    return text.replace("# Train: ", f"{NO_CONVERT}# Train: ", 1) if "convert.py" in text else text


for questions, paths in KEEP:
    if any(answers[question] not in kept for question, kept in questions.items()):
        for name in paths.split():
            remove(Path(name))
config = Path(f"config.{answers['workload']}.yaml")
if config.exists():
    config.replace("config.yaml")
for path in list(Path().glob("config.*.yaml")):
    remove(path)
for page in [*Path().glob("*.md"), *Path("docs").rglob("*.md")]:
    text = name_template(NUMBERS.sub("", choose_sections(page.read_text("utf-8"))))
    if page.name == "README.md":  # its title is the name of the project
        text = f"# {answers['project_name']}\n{text.partition(chr(10))[2]}"
    page.write_text(f"{name_tools(text).rstrip()}\n", "utf-8", newline="\n")
for name in (
    "pyproject.toml",
    "constraints.txt",
    ".github/workflows/ci.yml",
    *map(str, Path("configs").glob("*.yaml")),
):
    path = Path(name)
    path.write_text(name_tools(name_template(path.read_text("utf-8"))), "utf-8", newline="\n")
for pattern in LEFTOVERS:
    for path in list(Path().glob(pattern)):
        remove(path)
for folder in {Path(name).parent for _, paths in KEEP for name in paths.split()}:
    if folder.is_dir() and not folder.is_symlink() and not any(folder.iterdir()):
        folder.rmdir()

# `cruft update` and `cruft diff` bake old and new projects in temporary folders, where nothing is to be done next.
# Only cruft sets _commit; `cruft create` bakes in a folder of the user's choice.
parent = Path.cwd().parent
in_scratch = parent.parent == Path(tempfile.gettempdir()).resolve() and re.fullmatch("tmp[a-z0-9_]{8}", parent.name)
if not ("_commit" in answers and in_scratch):
    print(f"""
Next:
  cd {answers["project_slug"]}
  python3 -m venv .venv && .venv/bin/pip install -c constraints.txt -e "{name_tools(INSTALL)}"
  .venv/bin/python train.py
""")
