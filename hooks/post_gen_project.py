"""Delete the files and the sections of pages that were not asked for and what a run in place has left, name the package
of the engine if it is not copied, then say what to do next.

Running this script twice does the same as running it once. It uses the standard library only.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

answers = json.loads(r"""{{ cookiecutter | tojson }}""")

KEEP = [
    ({"engine": ["copy"]}, "fastgpu"),
    ({"launch": ["slurm", "kubernetes", "both"]}, "launch"),
    ({"launch": ["slurm", "both"]}, "launch/slurm.sh"),
    ({"launch": ["kubernetes", "both"]}, "launch/kubernetes.yaml launch/Dockerfile launch/Dockerfile.dockerignore"),
    ({"examples": ["yes"]}, "docs/examples"),
    ({"workload": ["images", "both", "own"]}, "data/digits.h5"),
    ({"workload": ["images", "recsys", "both"]}, "configs"),
    ({"workload": ["images", "both"]}, "configs/celeba.yaml configs/cifar10.yaml"),
    ({"workload": ["images", "both"]}, "configs/photos.yaml configs/imagenet.yaml"),
    ({"workload": ["images", "both"]}, "workloads/attributes.py workloads/images.py fastgpu/images"),
    ({"workload": ["images", "both"]}, "fastgpu/imagefiles fastgpu/convert/images"),
    ({"workload": ["recsys", "both"]}, "configs/recsys.yaml data/interactions-train.h5 data/interactions-val.h5"),
    ({"workload": ["recsys", "both"]}, "workloads/recsys.py fastgpu/convert/recsys fastgpu/predict/users.py"),
]
"""({question: answers that keep them}, paths): no other project has these files and folders."""
FACTS = {
    "images": answers["workload"] in ("images", "both"),
    "recsys": answers["workload"] in ("recsys", "both"),
    "own": answers["workload"] == "own",
    "digits": answers["workload"] != "recsys",
    "package": answers["engine"] == "package",
    "examples": answers["examples"] == "yes",
    "launch": answers["launch"] != "none",
    "slurm": answers["launch"] in ("slurm", "both"),
    "kubernetes": answers["launch"] in ("kubernetes", "both"),
}
"""What a page may ask by `<!-- only: package images or own -->`; `no-package` asks for the opposite."""
SECTION = re.compile(r"(?ms)(^)?<!-- only: ([^>]+) -->(?(1)\n)((?:(?!<!-- only:).)*?)<!-- end -->(?(1)\n)")
"""An innermost section: whole lines if its comment begins a line, else a part of a sentence, list or table."""
CLONE = "path/to/fastgpu-template"
"""Stands in the commands of pages for what cookiecutter is given."""
NOBODY = "https://github.com/org/"
"""How the variable `__template` begins as long as the owner of the template is not known."""
HOSTS = {"gh": "github.com", "gl": "gitlab.com", "bb": "bitbucket.org"}
"""Cookiecutter's short forms."""
FILLED = re.compile(r"(?m)^<!-- numbers: .*\n|<!-- words:(?: [\w-]+|end) -->")
"""Says which numbers and words of the template's benchmarks fill the page here."""
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


def expand(template: str) -> str:
    """What cookiecutter was given, without its short forms: gh:me/template is a URL."""
    host, _, path = template.partition(":")
    return f"https://{HOSTS[host]}/{path}" if host in HOSTS else template


def web_address(template: str) -> str:
    """The page of a template that cookiecutter was given, without passwords; empty for a folder or a zip file."""
    address = expand(template)
    found = re.fullmatch(r"https://(?:[^/@]*@)?([\w.:-]+(?:/[\w.~-]+?)+)(?:\.git)?/?", address)
    return f"https://{found[1]}" if found and not address.endswith(".zip") else ""


def template_page() -> str:
    """The page of the template that this project is made from; empty if none is known."""
    known = "" if answers["__template"].startswith(NOBODY) else answers["__template"]
    return web_address(answers.get("_template", "")) or known


def name_template(text: str, name: str) -> str:
    """A page with the address of its template: in links to README.md of the template, and in commands.

    Without a known address, the links become plain words.
    """
    address = template_page()
    up = "[.][.]/" * len(Path(name).parents)  # leads out of the project
    link = rf"\[([^\]]+)\]\({up}README[.]md\)"
    text = re.sub(link, lambda found: f"[{found[1]}]({address})" if address else found[1], text)
    return text.replace(CLONE, address or CLONE)


def name_url(text: str) -> str:
    """pyproject.toml with the address of the template, or without one."""
    address = template_page()
    urls = f'[project.urls]\nTemplate = "{address}"\n\n' if address else ""
    return re.sub(r"\[project\.urls\]\nTemplate = .*\n\n", lambda _: urls, text)


def revision() -> str:
    """The tag of the template's commit that this project is made from, or the commit; cruft gives the latter."""
    if "_commit" in answers:
        return str(answers["_commit"])
    for words in (["describe", "--tags", "--exact-match", "--match=v*"], ["rev-parse", "HEAD"]):
        command = ["git", "-C", answers["_repo_dir"], *words]
        if found := subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip():
            return found
    sys.exit("error: engine=package needs the commit of the template, which git does not tell")


def engine_url() -> str:
    """Where pip finds the engine: the template as cookiecutter was given it, at its tag or commit, without passwords.

    A folder or a zip file has no commit: pip takes what is there when it installs.
    """
    template = re.sub(r"^(\w+@[\w.-]+):(?!//)", r"ssh://\1/", expand(answers["_template"]))
    if "://" not in template:
        # Cookiecutter passes a path as it was typed, and starts this script in another folder.
        found = template if template.endswith(".zip") else answers.get("_repo_dir", template)
        path = Path(os.environ.get("PWD", ""), found).resolve()
        if not (path if path.suffix == ".zip" else path / "cookiecutter.json").is_file():
            sys.exit(f"error: engine=package needs the template's path from the root: {path} is not a template")
        return path.as_uri()
    template = re.sub(r"^((?:git\+)?https?://)[^/@]*@", r"\1", template)
    template = re.sub(r"^((?:git\+)?ssh://[^/:@]*):[^/@]*@", r"\1@", template)
    if template.endswith(".zip"):
        return template
    template = template.removeprefix("git+").replace("file:///", "file://localhost/")  # pip 23 refuses an empty host
    return f"git+{template}@{revision()}"


def depend_on_engine(text: str) -> str:
    """pyproject.toml with the engine in place of the packages that a copy of it needs.

    Jinja cannot choose, since ruff reads the file in the template, too.
    """
    extra = "[images]" if FACTS["images"] else ""
    needed = f'dependencies = [\n    "fastgpu-engine{extra} @ {engine_url()}",\n]'
    text = re.sub(r"(?ms)^dependencies = \[.*?^\]", lambda _: needed, text)
    return text.replace('files = ["*.py", "fastgpu", "workloads"]', 'files = ["*.py", "workloads"]')


def choose_files() -> None:
    """Delete the files that were not asked for, and what runs and builds in the template have left."""
    for questions, paths in KEEP:
        if any(answers[question] not in kept for question, kept in questions.items()):
            for name in paths.split():
                remove(Path(name))
    config = Path(f"config.{answers['workload']}.yaml")
    if config.exists():
        config.replace("config.yaml")
    for path in [*Path().glob("config.*.yaml"), *(path for pattern in LEFTOVERS for path in Path().glob(pattern))]:
        remove(path)
    for folder in {Path(name).parent for _, paths in KEEP for name in paths.split()}:
        if folder.is_dir() and not folder.is_symlink() and not any(folder.iterdir()):
            folder.rmdir()


def edit(path: Path, change: Callable[[str], str]) -> None:
    """Write a text file again."""
    path.write_text(change(path.read_text("utf-8")), "utf-8", newline="\n")


def edit_page(text: str, name: str) -> str:
    """A page of this project."""
    text = name_template(FILLED.sub("", choose_sections(text)), name)
    if name == "README.md":  # it begins with the name of the project and what it is for
        text = f"# {answers['project_name']}\n\n{answers['description']}\n\n{text.split(chr(10), 4)[4]}"
    return f"{text.rstrip()}\n"


def is_in_repository() -> bool:
    """Whether the project is made inside of a git repository, or there is no git."""
    if not shutil.which("git"):
        return True
    found = subprocess.run(["git", "rev-parse", "--git-dir"], capture_output=True, check=False)
    return found.returncode == 0


def next_steps() -> str:
    """What a person does first. Without a GPU, it takes the build of torch for CPUs, which is gigabytes smaller."""
    (version,) = re.findall(r"(?m)^torch==(.*)", Path("constraints.txt").read_text("utf-8"))
    steps = [
        f"cd {answers['project_slug']}",
        "git init -b main && git add -A && git commit -m 'Make the project from its template'",
        "python3 -m venv .venv && source .venv/bin/activate",
        f"pip install torch=={version} --index-url https://download.pytorch.org/whl/cpu",
        'pip install -c constraints.txt -e ".[dev,convert]"',
        "python train.py",
    ]
    if is_in_repository():
        del steps[1]
    if shutil.which("nvidia-smi"):
        steps = [step for step in steps if "--index-url" not in step]
    text = "\n  ".join(["\nNext:", *steps]) + "\n"
    if FACTS["package"] and "file:" in engine_url():
        text += f"""
The engine is installed from {engine_url()}, which other machines do not have.
docs/engine.md says what to write into pyproject.toml instead.
"""
    return text


def main() -> None:
    choose_files()
    for page in [*Path().glob("*.md"), *Path("docs").rglob("*.md")]:
        edit(page, partial(edit_page, name=page.as_posix()))
    edit(Path("pyproject.toml"), name_url)
    if FACTS["package"]:
        edit(Path("pyproject.toml"), depend_on_engine)

    # `cruft update` and `cruft diff` bake old and new projects in temporary folders, where nothing is to be done next.
    # Only cruft sets _commit; `cruft create` bakes in a folder of the user's choice.
    parent = Path.cwd().parent
    in_scratch = parent.parent == Path(tempfile.gettempdir()).resolve() and re.fullmatch("tmp[a-z0-9_]{8}", parent.name)
    if not ("_commit" in answers and in_scratch):
        print(next_steps())


if __name__ == "__main__":
    main()
