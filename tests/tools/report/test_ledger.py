"""Where the time of a run went: runs that are written here, and one that is really killed and resumed."""

import json
import math
import subprocess
import time
from pathlib import Path

import pytest
import report as script

from fastgpu.report.ledger import KINDS, account, as_rows, goodput, read_process
from fastgpu.report.results import compare, number, read_run
from support.ranks import kill_tree, run_train, train_command
from support.runs import wait_for_step

T0 = 1_700_000_000


def at(second: float, part: float = T0, **values: float) -> dict[str, float]:
    """A point that is logged this many seconds after the start of the first part."""
    values = {name.replace("save_s", "run/save_s"): value for name, value in values.items()}
    return {"time_s": T0 + second, "part": part} | values


def interval(second: float, step: int, part: float = T0, **values: float) -> dict[str, float]:
    """A point about ten steps, which took ten seconds, of which one was waiting for data."""
    return at(second, part, step=step, steps=10, seconds=10, wait_s=1) | at(second, part, **values)


def process(second: float, **values: float) -> dict:
    """A run.json that was written at this second. An old one knows nothing else."""
    started = time.strftime("%Y-%m-%dT%H:%M:%S+0000", time.gmtime(T0 + second))
    return {"started": started} | {name: T0 + value for name, value in values.items()}


def write_record(folder: Path, points: list[dict], processes: list[dict]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(point)}\n" for point in points))
    for number_, description in enumerate(processes, 1):
        (folder / f"run{f'-{number_}' if number_ > 1 else ''}.json").write_text(json.dumps(description))
    return folder


def spent_in(points: list[dict], processes: list[dict]) -> dict[str, float]:
    return {kind: round(s, 6) for kind, s in account(points, map(read_process, processes)).items()}


WHOLE = [interval(15, 10), interval(25, 20, save_s=2), at(33, step=20, save_s=3, **{"val/x": 1}), interval(44, 30)]
"""It started at second -2, and saved in the middle of an epoch and, for three seconds, after a validation of five."""


def test_ledger_accounts_for_every_second():
    spent = spent_in(WHOLE, [process(0, started_s=-2, ended_s=45)])
    assert spent == {
        "computing": 25,
        "waiting for data": 3,
        "starting": 7,
        "validating": 5,
        "saving": 2 + 3 + 1,
        "other": 1,
    }
    assert sum(spent.values()) == 45 + 2
    assert goodput(spent) == 25 / 47
    assert as_rows(spent)[-1] == ("wall time", "47.0 s", "100.0 %")
    assert as_rows({"computing": 3 * 86_400.0})[0] == ("computing", "3 days, 0:00:00", "100.0 %")


def test_ledger_of_an_older_run():
    points = [{name: value for name, value in point.items() if name != "run/save_s"} for point in WHOLE]
    expected = {"computing": 27, "waiting for data": 3, "starting": 5, "validating and saving": 8, "other": 1}
    assert spent_in(points, [process(0)]) == expected
    assert spent_in(points, []) == expected
    assert account([{"step": 1, "part": 1}], []) == {}
    stopped = [interval(15, 10), interval(1015, 20, T0 + 1000)]  # it continued with the next step
    assert spent_in(stopped, [process(0), process(1000)])["starting"] == 10
    assert "lost to kills" not in spent_in(stopped, [process(0), process(1000)])


RESUMED = [
    *(interval(15, 10), interval(25, 20), interval(35, 30), at(40, step=30, save_s=1, **{"val/x": 1})),
    *(interval(115, 15, T0 + 100), interval(125, 25, T0 + 100)),  # from a checkpoint at step 5
    *(interval(215, 30, T0 + 200), interval(225, 40, T0 + 200)),  # from one at step 20
]


def test_ledger_of_repeated_steps():
    descriptions = [process(n, started_s=n) for n in (0, 100, 150, 200)]  # that of second 150 did not come far
    spent = spent_in(RESUMED, descriptions)
    # Of the first part, half of an interval is kept; of the second one, one and a half.
    assert spent["computing"] == 9 * (0.5 + 1.5 + 2)
    assert spent["waiting for data"] == 4
    assert spent["starting"] == 5 + 5 + 5
    assert spent["lost to kills"] == (2.5 * 10 + 5) + (100 - 40) + 0.5 * 10 + (200 - 125)
    assert sum(spent.values()) == 225
    saved = [process(0, started_s=0, ended_s=41), *descriptions[1:]]  # the night after an end is not counted
    assert sum(spent_in(RESUMED, saved).values()) == 225 - (100 - 41)


def test_ledger_where_it_is_shown(tmp_path, capsys):
    run = write_record(tmp_path / "a", WHOLE, [process(0, started_s=-2, ended_s=45)])
    other = write_record(tmp_path / "b", [{"step": 1, "part": 1, "train/loss": 1}], [])
    head, *lines = compare([read_run(run), read_run(other)], number)
    assert [line[head.index("goodput")] for line in lines] == ["0.5319", "-"]
    script.main([str(run)])
    assert "    waiting for data  3.0 s   6.4 %\n" in capsys.readouterr().out
    page = (run / "report.html").read_text()
    assert '<div style="flex-grow: 53.2; --of: var(--c0)" title="computing: 25.0 s"></div>' in page
    assert "computing 25.0 s, 53.2 %" in page


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1.0, 0.0, 1e300, -1e300, 1e9])
@pytest.mark.parametrize("name", ["time_s", "seconds", "wait_s", "steps", "step", "part", "run/save_s"])
def test_ledger_of_impossible_times(tmp_path, name, value):
    """Also a clock that was set back: the parts overlap."""
    for place in range(len(RESUMED)):
        points = [*map(dict, RESUMED)]
        points[place][name] = value
        run = read_run(write_record(tmp_path, points, [process(n, started_s=n, ended_s=value) for n in (0, 100, 50)]))
        assert all(kind in KINDS and 0 < seconds < math.inf for kind, seconds in run.ledger.items())
        assert as_rows(run.ledger)


@pytest.mark.slow
def test_ledger_of_a_real_run(folder):
    """All of the time from the first start to the last end has a kind, also that of a kill."""
    words = ("train.epochs=20", "run.checkpoint_every_steps=50", "data.tier=disk")
    run = folder / "runs/a"
    with subprocess.Popen(train_command(*words), cwd=folder, stdout=subprocess.DEVNULL) as killed:
        wait_for_step(run, 60, killed)
        kill_tree(killed)
    assert run_train(*words, "run.resume=auto", cwd=folder).returncode == 0
    spent = read_run(run).ledger
    assert {"computing", "starting", "validating", "saving", "lost to kills"} <= spent.keys()
    first, second = (json.loads((run / f"run{suffix}.json").read_text()) for suffix in ("", "-2"))
    assert "ended_s" not in first
    assert sum(spent.values()) == pytest.approx(second["ended_s"] - first["started_s"], abs=0.1)  # times are rounded
