"""Faults that are planted in a copy of the project: the other tests on stand-ins for GPUs can fail."""

import sys

import pytest

from support import ROOT
from support.hollow import check_steps, edited_project, hollow, read_reports, train_on_gpus
from support.ranks import run_to_end

pytestmark = [pytest.mark.hollow, pytest.mark.slow]

FEED = ROOT / "tests/hollow/feed.py"
PREFETCH = "fastgpu/feed/prefetch.py"
WORDS = ("model.width=4", "train.epochs=3", "log.every_steps=7", "data.tier=disk", "data.pool_batches=4", "run.name=a")

KEEP = "t.model.kept = [*getattr(t.model, 'kept', []), torch.empty(1 << 20, device=batch.device)]"


@pytest.mark.parametrize(
    ("wait", "race"),
    [
        ("", ""),
        ("self._stream.wait_event(slot.used)", "race, write after read: copy H2D"),
        ("torch.cuda.current_stream(self._device).wait_event(slot.copied)", "race, read after write: "),
        ("slot.copied.synchronize()", "race, overwritten: the host changed the source"),
    ],
)
def test_hollow_lost_event_is_a_race(tmp_path, wait, race):
    """The feed as it is, and without one of the three waits for its events."""
    project = edited_project(tmp_path, PREFETCH, wait or "import sys\n", "pass" if wait else "import sys\n")
    settings = hollow(tmp_path / "report", copy_us=20_000)
    done = run_to_end([sys.executable, str(FEED)], project, PYTHONPATH=str(project), **settings)
    assert wait or done.returncode == 0, done.stderr
    (report,) = read_reports(tmp_path / "report")
    assert [note for note in report.notes if not note.startswith(race)] == []
    assert bool(report.notes) == bool(wait)


@pytest.mark.parametrize(
    ("name", "before", "after", "found"),
    [
        ("train.py", "loss_sum += loss.detach()", "loss_sum += loss.item()", "waits in step"),
        (PREFETCH, "pinned=bool(self._stream)", "pinned=False", "waits in step"),
        ("train.py", "loss_sum += loss.detach()", f"loss_sum += loss.detach()\n        {KEEP}", "allocations in step"),
    ],
)
def test_hollow_slow_step_is_noticed(tmp_path, name, before, after, found):
    """A read of the loss, a copy from pageable memory, and memory that is kept."""
    project = edited_project(tmp_path, name, before, after)
    train_on_gpus(tmp_path, *WORDS, f"run.folder={tmp_path}", root=project)
    with pytest.raises(AssertionError, match=found):
        check_steps(tmp_path, "a")


@pytest.mark.parametrize(
    ("name", "before", "after", "found"),
    [
        (PREFETCH, "torch.cuda.set_device(self._device)", "pass", r"contexts of the ranks: \[\[0\], \[0, 1\]\]"),
        (
            "train.py",
            "board.count(at.step, done)",
            "board.count(at.step, done)\n"
            "                world.is_main and world.all_reduce_sum(torch.ones(3, device=world.device))",
            r"\[hollow\] rank \d calls ncclAllReduce of .*, but rank \d calls ncclAllReduce of ",
        ),
    ],
)
def test_hollow_fault_of_ranks_is_noticed(tmp_path, name, before, after, found):
    """A feeder that opens a context on the GPU of rank 0, and a collective on rank 0 only."""
    project = edited_project(tmp_path, name, before, after)
    with pytest.raises(AssertionError, match=found):
        train_on_gpus(tmp_path, *WORDS, f"run.folder={tmp_path}", "dist.timeout_s=60", ranks=2, root=project)
