import re
import sys

from harness import ROOT, run_to_end


def test_the_loader_works_in_a_loop_of_somebody_else(tmp_path):
    """The program of docs/code.md, as it is."""
    page = (ROOT / "docs/code.md").read_text()
    program = re.search(r"## The loader alone.*?```python\n(.*?)```", page, re.DOTALL)
    assert program
    (tmp_path / "loop.py").write_text(program[1])
    (tmp_path / "data").symlink_to(ROOT / "data")
    done = run_to_end([sys.executable, "loop.py"], tmp_path, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    losses = [float(line.rpartition(" ")[2]) for line in done.stdout.splitlines()]
    assert len(losses) == 3
    assert losses[0] > losses[2] < 1.5  # by chance it would be 2.3
