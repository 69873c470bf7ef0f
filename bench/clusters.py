"""Run everything that the project says about several machines, and publish what came of it.

    python bench/clusters.py      ten minutes on two idle cores; it needs what `make slurm` needs

Each row of the page is a test: tests/template/test_slurm.py on a Slurm cluster of two nodes, test_launch_scripts.py
beside it on the files of launch/, and tests/engine with two agents of torchrun.
"""

import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import publish

ROOT = Path(__file__).parents[1]
RUNS = {
    "Slurm: launch/slurm.sh on two nodes, two processes on each": (
        ROOT,
        ["tests/template/test_slurm.py", "-m", "slurm"],
    ),
    "launch/kubernetes.yaml: the published schema, and a command line that trains": [
        "tests/template/test_launch_scripts.py"
    ],
    "two agents of torchrun, without a cluster": ["tests/engine/test_agents.py"],
    "train.py run.check=true": ["tests/engine/test_check.py"],
}


def run_tests(arguments: list[str]) -> list[list[str]]:
    """[test, outcome, seconds, what it measured] of each test."""
    with tempfile.TemporaryDirectory() as name:
        report = Path(name) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--junitxml={report}"]
        subprocess.run([*command, "-o", "junit_family=xunit1", *arguments], cwd=ROOT, check=False)
        return [_describe(case) for case in ElementTree.parse(report).iter("testcase")]


def _describe(case: ElementTree.Element) -> list[str]:
    outcomes = [child.tag for child in case if child.tag in ("failure", "error", "skipped")]
    measured = [f"{each.get('name')}: {each.get('value')}" for each in case.iter("property")]
    name = case.get("name", "").removeprefix("test_").replace("_", " ")
    return [name, outcomes[0] if outcomes else "passed", f"{float(case.get('time', 0)):.1f}", "; ".join(measured)]


def main() -> None:
    columns = ["test", "outcome", "s", "measured"]
    tables = [publish.Table(title, columns, run_tests(arguments)) for title, arguments in RUNS.items()]
    publish.write("clusters", tables, {}, "python bench/clusters.py")


if __name__ == "__main__":
    main()
