"""What the documents show exists: trees of files, commands and links. The tutorial does what it says: its blocks are
run in order, and what it shows is what is printed.

A block in the language `bash` is run. A block whose first line names a file, such as `# workloads/mynet.py`, is that
file. A block in the language `console` is a part of what the block before has printed: three dots stand for lines and
ends of lines that it leaves out, and numbers may differ. A block below `<!-- not run: reason -->` is skipped.
"""

import ast
import itertools
import json
import os
import re
import shutil
import sys
import tomllib
from pathlib import Path

import h5py
import numpy as np
import pytest

from support import PROJECT, ROOT
from support.projects import EXAMPLES, Block, convert_commands, read_blocks
from support.ranks import printed_by
from tools.facts import FOLDER, QUESTIONS, WORKLOAD_ANSWERS, project_files, tracked

DOCUMENTS = [name for name in tracked() if name.endswith(".md") and not name.startswith("bench/results/")]


@pytest.mark.parametrize("answer", WORKLOAD_ANSWERS)
def test_pages_tree_is_that_on_disk(baked, answer):
    project = baked(answer)
    section = (project / "docs/code.md").read_text().split("## What is where\n")[1].split("\n## ")[0]
    names = " ".join(re.findall(r"`[\w./]+`(?:, `[\w./]+`)*:", section))
    shown = set(re.findall(r"\w+(?:/|\.py|\.yaml)", names))
    assert {name for name in shown if not any(project.rglob(name.rstrip("/")))} == set()
    folders = {f"{path.name}/" for path in project.iterdir() if path.is_dir() and not path.name.startswith(".")}
    rooms = {f"{path.parent.name}/" for path in project.glob("fastgpu/*/__init__.py")}
    assert {path.name for path in project.glob("*.py")} | folders | rooms <= shown


def test_pages_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    text = (ROOT / "README.md").read_text() + (ROOT / "CONTRIBUTING.md").read_text()
    exist = set(re.findall(r"(?m)^([a-z-]+):", makefile))
    assert set(re.findall(r"(?m)(?:^|`)make ([a-z-]+)", text)) <= exist
    assert set(re.findall(r"(?m)^# make ([a-z-]+)", makefile)) == exist - {"help", "clean"}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_pages_show_no_template_language_and_no_unfinished_merge(name):
    """Nor lines that begin with a per cent sign, which the site takes for comments."""
    assert not re.search(r"(?m){%|{{ |^[<>]{7} |^ *%", (ROOT / name).read_text())


@pytest.mark.parametrize("name", DOCUMENTS)
def test_pages_links_and_commands_exist(name):
    text = (ROOT / name).read_text()
    for link, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", text):
        target = (ROOT / name).parent / link if link else ROOT / name
        assert target.exists(), link
        headings = re.findall(r"(?m)^#+ (.+)$", target.read_text()) if anchor else [""]
        anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
        assert anchor in anchors, f"{link}#{anchor}"
    blocks = re.findall(r"(?ms)^```(?:bash|sh)\n(.*?)^```$", text)
    examples = {f"configs/{path.name}" for path in EXAMPLES.glob("*.yaml")}  # once a person has copied them
    exist = {*project_files(), *examples, *re.findall(r"(?m)^```\w+\n# ([\w./-]+)$", text)}  # or are made on the page
    for command in "\n".join(blocks).replace("\\\n", " ").splitlines() if name.startswith(FOLDER) else []:
        words = command.split(" #")[0].split()
        assert {word for word in words if re.fullmatch(r"\w+\.py|configs/\S+", word)} <= exist, command
        for word, after in itertools.pairwise(words):
            assert word != "convert.py" or after in convert_commands(PROJECT), command


OTHER_INSTALLS = (
    r"(?:cookiecutter|cruft|pre-commit|py-spy|scikit-learn|torch==\S+ --index-url|-r|-q|'\{DISTRIBUTION\S+) "
)
"""Programs beside a project, torch for CPUs, environments of the template's own tools, and the engine without one."""


def test_pages_installs_take_the_constraints():
    """An install without them takes other versions: torchvision of another one would replace torch, for example."""
    for name in tracked():
        if name.startswith(("tests/", "bench/", "CHANGELOG.md")) or Path(name).suffix in (".h5", ".png"):
            continue
        text = (ROOT / name).read_text()
        joined = re.sub(r"\s+(?:# +)?", " ", text) + " "  # a command may be broken at the end of a line
        found = [joined[at.end() :] for at in re.finditer(r"pip install ", joined)]
        allowed = re.compile(rf"(?:--\S+ )*-c constraints.txt |{OTHER_INSTALLS}")
        assert [command[:40] for command in found if not allowed.match(command)] == [], name
        if re.search(r"-c constraints.txt (?:torchvision|-e .\.\[timm)", joined):
            index = "torchvision --index-url https://download.pytorch.org/whl/cpu"
            assert index in joined or "the head of constraints.txt" in joined, name


TIMES = r"x(?= as| the|,|;|\.|\)|$| slower| faster)|times (?:as|slower|faster|the (?:speed|time|CPU|rows|samples))"
RATE = r"(?:[a-z]+ )?(?:rows|samples|images|users|steps|MB|GB|MiB|GiB)/s"
UNIT = rf"(?:ms|us|\xb5s|{TIMES})(?!\w)|{RATE}"
SPEED = re.compile(rf"(?m)(?<![\w.,])\d[\d.,]* ?(?:{UNIT})|\[\d[\d.,]*-\d[\d.,]*\]")
"""A number of speed: `1.31x`, `20 ms`, `1.5 times as fast`, `2,659 fresh rows/s`, a range such as `[0.39-0.41]`."""
SOURCE = re.compile(r"20\d\d-\d\d|bench/results/|<!-- (?:numbers|results)")
"""The date of a measurement, its page, or the mark of a table that bench/publish.py fills."""


def paragraphs(name: str) -> list[str]:
    """Of a page, its paragraphs, tables and fenced blocks; of code, docstrings and comments."""
    text = (ROOT / name).read_text()
    if not name.endswith(".md"):
        return re.findall(r'(?ms)""".*?"""|(?:^ *#.*?\n)+|(?<=  )# .*?$', text)
    joined = re.sub(r"(?ms)^```.*?^```$", lambda block: re.sub(r"\n+", "\n", block[0]), text)
    return joined.split("\n\n")


def speeds_without_source(name: str) -> list[str]:
    """Numbers of speed whose paragraph has no source, nor the one before it or after it. What a command prints may have
    it in the introduction of the page."""
    parts = paragraphs(name)
    introduction = list(itertools.takewhile(lambda part: "\n## " not in f"\n{part}", parts))
    missing = []
    for number, part in enumerate(parts):
        near = parts[max(0, number - 1) : number + 2] if name.endswith(".md") else [part]
        near += introduction if "```" in part else []
        missing += [] if any(map(SOURCE.search, near)) else [found[0] for found in SPEED.finditer(part)]
    return missing


CODE = [name for name in tracked() if re.search(r"\.(py|yaml|toml)$", name) and not re.match("tests/|bench/", name)]


@pytest.mark.parametrize("name", [*DOCUMENTS, *CODE])
def test_every_number_of_speed_has_a_source(name):
    assert speeds_without_source(name) == []


@pytest.mark.parametrize(
    "planted",
    ["It is 1.31x as fast.", "2.5 times as fast", "A step takes 12 ms.", "24,310 fresh rows/s", "0.04 [0.03-0.05] |"],
)
def test_a_number_of_speed_without_a_source_is_found(planted, tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    for source in ("", " (2 cores, 2026-11-28)"):
        (tmp_path / "page.md").write_text(f"# Page\n\nWords.\n\n{planted}{source}\n\nWords.\n")
        assert bool(speeds_without_source("page.md")) == (not source)


def normalised(line: str) -> str:
    """A line in which every number is 0 and every run of spaces one space, without notes that depend on the machine: on
    an equal value, which depends on the last digits, and on waiting, which depends on its load."""
    line = re.sub(r"; \S+ equals that of epoch \d+, (which stays the best one|but the loss is .* best now)", "", line)
    line = re.sub(r" \(input-bound[^)]*\)", "", line)
    return re.sub(r"\s+", " ", re.sub(r"\d[\d,.]*(?:e[+-]?\d+)?", "0", line)).strip()


def missing_lines(shown: str, printed: str) -> list[str]:
    """The lines of a console block that the command did not print, or not in this order."""
    remaining = iter([normalised(line) for line in re.split(r"[\n\r]", printed)])
    missing = []
    for line in shown.splitlines():
        start, dots, _ = normalised(line).partition("...")
        fits = (lambda text, start=start: text.startswith(start.strip())) if dots else start.__eq__
        if (start or not dots) and not any(map(fits, remaining)):
            missing.append(line)
    return missing


@pytest.mark.slow
@pytest.mark.parametrize(
    "workload", ["images", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("recsys", "own"))]
)
def test_pages_tutorial_works(own_copy, workload):
    """As a person types it, in the environment of these tests."""
    project = own_copy(workload)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {"PATH": path, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    blocks = [block for block in read_blocks(project / "docs/tutorial.md") if not block.reason]
    assert {block.language for block in blocks} == {"bash", "console", "python"}
    for block in blocks:
        if block.target:
            (project / block.target).write_text(block.text)
        elif block.language == "bash":
            printed = printed_by(["bash", "-euc", f"exec 2>&1; {block.text}"], project, **environment)
        else:
            assert not missing_lines(block.text, printed), printed


README = (ROOT / "README.md").read_text()
STRANGER = """\
#!/bin/sh
mkdir -p "$3/bin"
ln -s "{tools}/cookiecutter" "$3/bin/cookiecutter"
printf '#!/bin/sh\\n' > "$3/bin/pip"
printf '#!/bin/sh\\nexec "{python}" "$@"\\n' > "$3/bin/python"
chmod +x "$3/bin/python" "$3/bin/pip"
echo "PATH=$PWD/$3/bin:$PATH" > "$3/bin/activate"
"""
"""python3 that makes environments without downloads: what is installed here stands in for what pip would bring."""


@pytest.mark.slow
def test_pages_readme_works_in_a_clone(template, tmp_path):
    """As somebody types it who has nothing but the clone."""
    clone = shutil.copytree(template, tmp_path / "clone")
    (tmp_path / "bin").mkdir()
    python3 = tmp_path / "bin/python3"
    python3.write_text(STRANGER.format(tools=Path(sys.executable).parent, python=sys.executable))
    python3.chmod(0o755)
    commands, shown = [
        block.text for block in read_blocks(ROOT / "README.md") if block.language in ("bash", "console")
    ][:2]
    assert len([line for line in commands.splitlines() if not line.startswith("#")]) == 5
    path = f"{python3.parent}:{os.environ['PATH']}"
    settings = {"COOKIECUTTER_CONFIG": str(tmp_path / "cookiecutter.yaml"), "OMP_NUM_THREADS": "1"}
    (tmp_path / "cookiecutter.yaml").write_text(f"cookiecutters_dir: {tmp_path}/c\nreplay_dir: {tmp_path}/r\n")
    printed = printed_by(["bash", "-euc", f"exec 2>&1; {commands}"], clone, PATH=path, **settings)
    assert missing_lines(shown, printed) == []


def test_pages_readme_says_what_a_project_has(baked):
    """Its tree, with the numbers of lines, its excerpt of the loop, the questions, and the versions."""
    project = baked("both")
    tree = dict(re.findall(r"(?m)^[├└]── ([\w.]+)/? +(.*)$", README))
    assert [name for name in tree if not (project / name).exists()] == []
    assert {path.name for path in project.glob("*.py")} <= tree.keys()
    for name in ("train.py", "workloads/minimal.py"):
        assert f" {len((project / name).read_text().splitlines())} lines" in tree[name.split("/")[0]] + " ", name

    (excerpt,) = (block.text for block in read_blocks(ROOT / "README.md") if block.language == "python")
    lines = iter([line.strip() for line in (project / "train.py").read_text().splitlines()])
    assert [line for line in excerpt.splitlines() if line.strip() != "..." and line.strip() not in lines] == []

    table = dict(re.findall(r"(?m)^\| `(\w+)`: [^|]*\| (.*) \|$", README))
    assert table.keys() == {
        name for name, each in QUESTIONS.items() if isinstance(each, list) and name != "license"
    } - {"_copy_without_render"}
    assert all(f"`{answer}`" in text for name, text in table.items() for answer in QUESTIONS[name])

    (version,) = re.findall(r'TEMPLATE_VERSION = "(.*)"', (project / "fastgpu/__init__.py").read_text())
    meta = tomllib.loads((project / "pyproject.toml").read_text())["project"]
    (lowest,) = (each for each in meta["dependencies"] if each.startswith("torch>="))
    head = README.split("\n![")[0]
    assert f"[version {version}](CHANGELOG.md)" in head
    assert f"Python {meta['requires-python'].removeprefix('>=')} to" in head
    assert f"torch {lowest.removeprefix('torch>=')} to" in head


def test_pages_frequent_messages_are_printed():
    """Each piece of a heading, between dots and brackets, is in a string of the engine or in a tested message."""
    source = [ast.parse(path.read_text()) for path in (ROOT / FOLDER / "fastgpu").rglob("*.py")]
    nodes = (node for tree in source for node in ast.walk(tree))
    strings = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    texts = "\n".join([*strings, *(path.read_text() for path in (ROOT / "tests").rglob("messages.yaml"))])
    section = (ROOT / FOLDER / "docs/troubleshooting.md").read_text().split("\n## Messages of this project\n")[1]
    headings = re.findall(r"(?m)^### (.*)$", section)
    assert len(headings) == 15
    for heading in headings:
        assert [piece for piece in re.split(r"\.\.\.| \(|\)|; ", heading) if piece not in texts] == [], heading


def without_comments(block: Block) -> str:
    """The text of a block; of commands and programs, without the comments."""
    return block.text if block.language == "console" else re.sub(r"(?m)(?:^|  )#(?!!).*$", "", block.text)


@pytest.mark.parametrize(
    ("original", "translation"),
    [
        ("README.md", "docs/ko/README.md"),
        (f"{FOLDER}/docs/tutorial.md", f"{FOLDER}/docs/ko/tutorial.md"),
        (f"{FOLDER}/docs/why-is-my-gpu-idle.md", f"{FOLDER}/docs/ko/why-is-my-gpu-idle.md"),
    ],
)
def test_pages_translations_have_the_same_commands(original, translation):
    """Comments and drawings of trees may be translated."""
    ours, theirs = (
        [without_comments(block) for block in read_blocks(ROOT / page) if block.language != "text"]
        for page in (original, translation)
    )
    assert ours == theirs


@pytest.mark.slow
@pytest.mark.parametrize(
    "workload", ["images", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("recsys", "own"))]
)
def test_pages_notebook_runs(own_copy, workload):
    project = own_copy(workload)
    printed_by([sys.executable, "train.py", "train.epochs=1", "run.name=first"], project)
    blocks = [block.text for block in read_blocks(project / "docs/python.md") if block.language == "python"]
    (project / "page.py").write_text("\n".join(blocks))
    printed = printed_by([sys.executable, "page.py"], project)
    assert {"images": "images", "recsys": "items", "own": "x"}[workload] in printed
    assert (project / "batch.png").exists() == (workload == "images")
    folds = [*(project / "data").glob("part-?.h5")]
    assert len(folds) == (5 if workload == "images" else 0)
    if folds:
        held_out, *others = map(str, sorted(folds))
        words = [f"data.train=[{','.join(others)}]", f"data.val={held_out}", "run.check=true"]
        printed_by([sys.executable, "train.py", *words], project)


def write_volumes(folder: Path) -> None:
    """Three volumes of noise; a half of each is brighter, which is the foreground."""
    rng = np.random.default_rng(0)
    for number in range(3):
        mask = np.zeros((50, 60, 33), np.uint8)
        mask[:, :12] = 1
        with h5py.File(folder / f"{number}.h5", "w") as file:
            file["image"], file["mask"] = rng.integers(0, 100, mask.shape, np.uint8) + 100 * mask, mask


@pytest.mark.slow
def test_pages_volumes_train_on_patches_of_tiles(own_copy):
    """The section of docs/data.md, with smaller tiles, as a person types it."""
    project = own_copy("own")
    page = project / "page.md"
    section = (project / "docs/data.md").read_text().split("## Volumes and large images\n")[1].split("\n## ")[0]
    page.write_text(section.replace("TILE, STRIDE = 128, 65", "TILE, STRIDE = 32, 17"))
    for folder in ("volumes", "data", "configs"):
        (project / folder).mkdir(exist_ok=True)
    write_volumes(project / "volumes")
    commands = []
    for block in read_blocks(page):
        if block.target:
            (project / block.target).write_text(block.text)
        commands += block.text.splitlines() if block.language == "bash" else []
    tiles, train = (command.split()[1:] for command in commands)
    printed_by([sys.executable, *tiles], project)

    # Each patch of 16 is in a tile, and the tiles have what the masks say.
    found = {}
    for name in ("fg", "bg", "val"):
        with h5py.File(project / f"data/tiles-{name}.h5") as file:
            found[name] = file["mask"][:]
    assert found["fg"].any((1, 2, 3)).all()
    assert not found["bg"].any()
    n_tiles = 3 * 3 * 2
    assert (len(found["fg"]) + len(found["bg"]), len(found["val"])) == (2 * n_tiles, n_tiles)

    small = ("model.patch=16", "model.width=4", "train.epochs=2", "dist.device=cpu", "run.name=a", "optim.lr=3e-2")
    printed = printed_by([sys.executable, *train, *small], project, OMP_NUM_THREADS="1")
    assert float(re.findall(r"val/dice ([\d.]+)", printed)[-1]) > 0.9
    assert "tiles-fg.h5 (" in printed
    options = {"patch": 16}
    program = "import torch; from fastgpu.rows import Rows; from workloads.patches import Workload; "
    program += f"workload = Workload(Workload.Options(**{options}), None, None); "
    program += "x = torch.arange(5 * 32**3, dtype=torch.int32).view(5, 32, 32, 32); "
    program += "patches = workload.transform(Rows({'image': x}), torch.Generator())['image'].flatten(1); "
    program += "print((patches - patches[:, :1]).unique(dim=0).shape, (patches[:, 0] // 32**3).tolist())"
    assert (
        printed_by([sys.executable, "-c", program], project).split("\n")[0] == "torch.Size([1, 4096]) [0, 1, 2, 3, 4]"
    )


RAGGED_CONFIG = """
workload: lengths
data: {dataset: "mine:Words", train: "40", val: "20", fields: {x: x, y: y}, batch_size: 8}
loader: {num_workers: 1}
"""
RAGGED_DATASET = """
import numpy as np

class Words:
    def __init__(self, n_rows):
        self.n_rows = int(n_rows)
    def __len__(self):
        return self.n_rows
    def __getitem__(self, row):
        return {"x": np.full((row % 4, 3), row, np.float32), "y": np.float32(row)}
"""
RAGGED_WORKLOAD = """
import torch
from torch import nn
from workloads import minimal

class Workload(minimal.Workload):
    def model(self):
        return nn.Linear(3, 1)
    def predict(self, model, batch):
        x = batch["x"]
        return {"prediction": torch.zeros(len(batch)).index_add(0, x.rows, model(x.values)[:, 0].float())}
"""


@pytest.mark.slow
def test_pages_notebook_runs_with_ragged_rows(own_copy):
    project = own_copy("own")
    for name, text in (
        ("config.yaml", RAGGED_CONFIG),
        ("mine.py", RAGGED_DATASET),
        ("workloads/lengths.py", RAGGED_WORKLOAD),
    ):
        (project / name).write_text(text)
    printed_by([sys.executable, "train.py", "train.epochs=1", "run.name=first"], project)
    blocks = [block.text for block in read_blocks(project / "docs/python.md") if block.language == "python"]
    lists = "lists = [[[1, 2, 3]], [], [[1, 2, 3]] * 2]\nprint(trained.predict(x=lists)['prediction'].tolist())"
    (project / "page.py").write_text("\n".join([*blocks, lists]))
    *_, predicted = printed_by([sys.executable, "page.py"], project).splitlines()
    one, none, two = json.loads(predicted)
    assert (none, two) == (0, pytest.approx(2 * one))
