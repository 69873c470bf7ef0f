"""What report.py says about runs that are written here: values, where the time went, and the command. One run is really
killed and resumed."""

import csv
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from math import nan
from pathlib import Path
from typing import Any

import pytest

from fastgpu.process.commands import parse
from fastgpu.process.launch import UserError
from fastgpu.report.command import Report, report
from fastgpu.report.ledger import BAR_WIDTH, KINDS, account, as_rows, bar, goodput, read_process
from fastgpu.report.results import as_text, by_metric, compare, number, over_run, read_run, summary
from fastgpu.telemetry.clock import Throughput
from support import PROJECT
from support.ranks import kill_tree, run_train, train_command
from support.runs import wait_for_step

VALUES = {
    "train/loss": 0.5,
    "train/lr": 0.003,
    "data/wait_pct": 3.0,
    "data/fresh_rows_per_s": 12_345.6,
    "train/trained_rows_per_s": 24_691.2,
    "host/cpu_user_pct": 12.0,
    "gpu0/util_pct": 97.0,
    "gpu0/util_min_pct": 80.0,
    "gpu1/util_pct": 50.0,
    "gpu0/power_w": 300.0,
}


def write_points(folder: Path, points: list[dict[str, float]]) -> Path:
    """metrics.jsonl in a folder, which is made. Points that say nothing else are of part 1."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps({"part": 1} | point) + "\n" for point in points))
    return folder


def write_run(folder: Path) -> Path:
    """A run's folder. The values of its tags rise a little from each point to the next."""
    points = [{"step": n} | {tag: value * (1 + n / 1000) for tag, value in VALUES.items()} for n in range(5)]
    write_points(folder, [*points, {"step": 5, "val/loss": 0.25, "val/top1_pct": 99.0}])
    text = "workload: images\nrun: {name: x, seed: 3}\ndata: {train: a.h5, tier: disk, echo: 1.0}\nmodel: {width: 8}\n"
    (folder / "config.yaml").write_text(text)
    (folder / "run.json").write_text(json.dumps({"best": ["top1_pct", "higher"]}))
    return folder


def test_report_means_are_sums_over_sums():
    """Rows per second times the time of a step is the batch size, however uneven the points are.

    The first point of each part, which holds what happens only at the start, does not count.
    """
    intervals = [
        Throughput(seconds=9.0, wait_s=8.0, fresh_rows=32 * 5, trained_rows=64 * 5, steps=5),
        Throughput(seconds=0.5, wait_s=0.0, fresh_rows=64 * 50, trained_rows=64 * 50, steps=50),
        Throughput(seconds=7.0, wait_s=6.0, fresh_rows=32 * 5, trained_rows=64 * 5, steps=5),
        Throughput(seconds=20.0, wait_s=5.0, fresh_rows=32 * 40, trained_rows=64 * 40, steps=40),
    ]
    points = [
        {"part": part, "gpu0/util_min_pct": low, "gpu0/mem_peak_gib": low, "val/x": low}
        | (each._asdict() | each.scalars())
        for each, part, low in zip(intervals, (1, 1, 2, 2), (1.0, 30.0, 2.0, 4.0), strict=True)
    ]
    expected = {"data/fresh_rows_per_s": (64 * 50 + 32 * 40) / 20.5, "data/wait_pct": 100 * 5 / 20.5}
    expected |= {"train/step_ms": 1000 * 20.5 / 90, "gpu0/util_min_pct": 1, "gpu0/mem_peak_gib": 30, "val/x": 4}
    assert {name: over_run(points, name) for name in expected} == pytest.approx(expected)


@pytest.mark.parametrize(("metric", "direction", "step"), [("a", "higher", 6), ("a", "lower", 4), ("b", "lower", 6)])
def test_report_best_value(tmp_path, metric, direction, step):
    values = (nan, 2.0, 3.0, 5.0, 1.0, 5.0, 5.0, 5.0)
    losses = (9.0, 9.0, 9.0, 2.0, 1.0, 1.0, 1.0, 3.0)  # of equal values the last one without a higher loss
    points = [
        {"step": n, "val/a": value, "val/b": -value, "val/loss": loss}
        for n, (value, loss) in enumerate(zip(values, losses, strict=True))
    ]
    write_points(tmp_path, points)
    assert next(iter(summary(read_run(tmp_path)))) == "val/a"
    (tmp_path / "run.json").write_text(json.dumps({"best": [metric, direction]}))
    best = values[step] if metric == "a" else -values[step]
    assert list(summary(read_run(tmp_path)).items())[:2] == [(f"best {metric}", best), ("at step", step)]


def test_report_best_value_of_several_sets(tmp_path):
    losses = {"val/day/loss": (3.0, 1.0, 2.0), "val/night/loss": (1.0, 2.0, 0.0), "val/loss": (0.0, 1.0, 2.0)}
    points = [{"step": n, "val/day/a": 5.0, **{name: values[n] for name, values in losses.items()}} for n in range(3)]
    write_points(tmp_path, points)
    (tmp_path / "config.yaml").write_text("data: {val: {night: a.h5, day: b.h5}}")
    (tmp_path / "run.json").write_text(json.dumps({"best": ["day/a", "higher"]}))
    assert list(summary(read_run(tmp_path)).items())[:2] == [("best day/a", 5.0), ("at step", 1)]


def test_report_reads_the_newest_whole_files(tmp_path):
    run = read_run(write_run(tmp_path))
    assert (run.config["run.seed"], run.config["model.width"], run.best) == (3, 8, ("top1_pct", "higher"))
    (tmp_path / "config-3.yaml").write_text("")  # what a full disk may leave
    (tmp_path / "run-3.json").write_text("{'cut")
    assert read_run(tmp_path) == run


@pytest.mark.parametrize(("direction", "order"), [("lower", "bac"), ("higher", "abc")])
def test_report_compares_runs(tmp_path, direction, order):
    lines = {"a": ["0.5", "0.1", "2.5", "1", "8"], "b": ["0.25", "0.01", "2.5", "1", "8"]}
    lines["c"] = ["-", "0.1", "2.5", "1", "8"]
    runs = []
    for name, (mse, lr, *_) in lines.items():
        metrics = {"val/mse": float(mse.replace("-", "nan")), "train/loss": 1.0}
        folder = write_points(tmp_path / name, [{"step": 4} | metrics, {"step": 8, "data/wait_pct": 2.5}])
        folder.joinpath("config.yaml").write_text(f"run: {{name: {name}}}\noptim: {{lr: {lr}}}\ndata: {{echo: 1}}\n")
        folder.joinpath("run.json").write_text(json.dumps({"best": ["mse", direction]}))
        runs.append(read_run(folder))
    head, *compared = compare(runs, number)
    assert head == ["run", "best mse", "optim.lr", "data/wait_pct", "train/loss", "steps"]
    assert compared == [[str(tmp_path / name), *lines[name]] for name in order]


def test_report_compares_runs_of_one_metric(tmp_path):
    """A run of users and one of digits have no metric in common."""
    runs = []
    for number_, (metric, direction) in enumerate((("ndcg", "higher"), ("mse", "lower"), ("ndcg", "higher"))):
        folder = write_points(
            tmp_path / str(number_), [{"step": 1, f"val/{metric}": float(number_), "val/x": -number_}]
        )
        folder.joinpath("run.json").write_text(json.dumps({"best": [metric, direction]}))
        folder.joinpath("config.yaml").write_text(f"optim: {{lr: {10**number_}}}\n")
        runs.append(read_run(folder))
    assert by_metric(runs) == [[runs[0], runs[2]], [runs[1]]]
    for sort, order in (("", "201"), ("optim.lr", "021"), ("val/x", "201"), ("steps", "021")):
        head, *lines = compare(runs, number, sort)
        assert [Path(line[0]).name for line in lines] == [*order]
        assert head == [*dict.fromkeys(["run", "best ndcg", sort or "optim.lr", "optim.lr", "steps", "best mse"])]


def test_report_table_has_the_width_of_a_terminal():
    lines = [["run", "best", "lr"], ["runs/a", "0.25", "0.001"]]
    assert as_text(lines) == as_text(lines, 19) == "run     best  lr\nruns/a  0.25  0.001"
    assert as_text(lines, 18) == "run     best\nruns/a  0.25\n(not shown: lr; --csv has all)"
    assert as_text(lines, 1) == "run\nruns/a\n(not shown: best, lr; --csv has all)"


def run(*words: object) -> None:
    """report.py with these words, in this process."""
    report(parse(Report, [*map(str, words)], program="report.py"))


def run_program(*words: object, **streams: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "report.py", *map(str, words)]
    return subprocess.run(command, cwd=PROJECT, stderr=subprocess.PIPE, text=True, check=False, **streams)


def test_report_summary_and_comparison(tmp_path, capsys):
    runs = [write_run(tmp_path / "x" / "a"), write_run(tmp_path / "y" / "a")]
    other = write_points(tmp_path / "z", [{"step": 1}])
    (tmp_path / "empty").mkdir()
    run("--compare", *runs, other, tmp_path / "empty")
    first, second = capsys.readouterr().out.split("\n\n")
    assert [line.split()[0] for line in first.splitlines()] == ["run", *map(str, runs)]
    assert [line.split()[0] for line in second.splitlines()] == ["run", str(other)]
    run(runs[0])
    shown = capsys.readouterr().out
    assert shown.startswith(f"{runs[0]}\n  best top1_pct ")
    assert re.search(r"  data/wait_pct +3.008\n", shown)


@pytest.mark.parametrize("words", [(), ("--compare",), ("--csv",)])
def test_report_names_runs_without_a_point(words, tmp_path, capsys):
    folders = [tmp_path / "a", write_run(tmp_path / "b"), write_points(tmp_path / "c", [])]
    folders[0].mkdir()
    run(*words, *folders)
    told = f"left out: 2 without a point in metrics.jsonl: {folders[0]}, {folders[2]}\n"
    assert capsys.readouterr().err == told


def test_report_csv_is_for_programs(tmp_path, capsys):
    """Numbers have all their figures, and no cell is a formula."""
    for name, note in (("a", "=1+1"), ("b", "-2"), ("c", "-2+1"), ("d", "x")):
        folder = write_points(tmp_path / name, [{"step": 1, "train/loss": -12345.25}])
        folder.joinpath("config.yaml").write_text(f"model: {{note: '{note}', '@n': {name}}}\n")
    run("--csv", *sorted(tmp_path.iterdir()))
    head, *lines = csv.reader(capsys.readouterr().out.splitlines())
    assert head == ["run", "model.note", "model.@n", "train/loss", "steps"]
    assert [line[1::2] for line in lines] == [[note, "-12345.25"] for note in ("'=1+1", "-2", "'-2+1", "x")]


def test_report_shows_terminal_escapes(tmp_path):
    folder = write_points(tmp_path / "a", [{"step": 1, "val/\x1b[31mred": 1.0}])
    assert r"val/\x1b[31mred" in run_program(folder, stdout=subprocess.PIPE).stdout


def test_report_ends_quietly_in_a_closed_pipe(tmp_path):
    read_end, write_end = os.pipe()
    os.close(read_end)
    done = run_program("--compare", write_run(tmp_path / "a"), stdout=write_end)
    os.close(write_end)
    assert (done.returncode, done.stderr) == (-signal.SIGPIPE, "")


def test_report_on_a_full_disk_is_one_line(tmp_path):
    with Path("/dev/full").open("w") as full:
        done = run_program("--compare", write_run(tmp_path / "a"), stdout=full)
    assert done.returncode == 2
    assert done.stderr.startswith("error: the output cannot be written ([Errno 28] ")


def test_report_mistakes_are_named(tmp_path):
    write_run(tmp_path / "a")
    for words, message in (
        (["nowhere"], "nowhere does not exist (looked in "),
        ([tmp_path], f"{tmp_path}: no points in metrics.jsonl; it is no run, or has just begun"),
        ([tmp_path / "a", "--sort", "steps"], "--sort is for --compare and --csv"),
        ([tmp_path / "a", "--csv", "--sort", "lr"], "--sort is lr, which no run has; name a scalar such as "),
    ):
        with pytest.raises(UserError, match=re.escape(message)):
            run(*words)


ODD_LINES = (
    *(b"5", b"{}", b"\xff\xfe", b"[" * 99_999, b'{"step": 1, "part"', b'{"step": "x", "part": 1}', b""),
    *(b'{"step": NaN, "part": 1}', b'{"step": 1, "part": null}', b'{"step": 1' + b"0" * 400 + b', "part": 1}'),
)
ODD_POINT = b'{"step": 6, "part": 1, "val/a": "text", "val/b": true, "val/\\ud800": 2.5, "val/c": []}'
MANY_ALIASES = [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}' if n else '*a'] * 9)}]\n" for n in range(12)]
ODD_CONFIGS = (
    *("5", "a: &a [*a]", "a: " + "[" * 50_000, "? [1, 2]\n: 3", "1: 2", "a: 2024-11-27", "a: !!float ''"),
    *("a: !!binary aGk=", 'a: "\\ud800"', "a: &a {x: 1}\n" + "".join(MANY_ALIASES)),
)
ODD_DESCRIPTIONS = (
    *("5", '{"best": 5}', '{"best": [1, {}]}', '{"gpu": [], "started": {}}', '{"started": "9999-99-99"}'),
    '{"started": "2024-01-01", "started_s": "x"}',
)


def test_report_of_whatever_a_folder_holds(tmp_path, capsys):
    """Odd lines are counted. Odd files, and those that would never end, are not read."""
    folders = [write_run(tmp_path / name) for name in ("lines", "fifos", "good")]
    with folders[0].joinpath("metrics.jsonl").open("ab") as file:
        file.write(b"\n".join([*ODD_LINES, ODD_POINT]))
    for name in ("config-2.yaml", "run-2.json"):
        os.mkfifo(folders[1] / name)
    texts = [("config-2.yaml", text) for text in ODD_CONFIGS] + [("run-2.json", text) for text in ODD_DESCRIPTIONS]
    for place, (name, text) in enumerate(texts):
        folders.append(write_run(tmp_path / str(place)))
        (folders[-1] / name).write_text(text)
    for words in ((), ("--compare",), ("--csv",)):
        run(*words, *folders)
        (warning,) = capsys.readouterr().err.splitlines()
        assert warning.startswith(f"warning: {len(ODD_LINES)} lines of {tmp_path}/lines/metrics.jsonl are no points")


def test_report_needs_no_torch():
    code = "import sys, fastgpu.report.command; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=PROJECT, check=False).returncode == 0


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
    write_points(folder, points)
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
    report(Report(runs=(run,)))
    shown = capsys.readouterr().out
    assert f"  where the time went:\n    {'#' * 38}{'.' * 5}{'>' * 11}{'v' * 7}{'s' * 9}--\n" in shown
    assert "    . waiting for data  3.0 s   6.4 %\n" in shown


def test_ledger_bar_has_one_width():
    """Each kind has its own character, the same in every run."""
    assert len({*KINDS.values()}) == len(KINDS)
    for spent in ({"computing": 1e-9, "other": 1e8}, dict.fromkeys(KINDS, 1 / 3), {"saving": 7.0}):
        line = bar(spent)
        assert len(line) == BAR_WIDTH
        assert [*dict.fromkeys(line)] == [KINDS[kind] for kind, s in spent.items() if s > 1e-6]
    assert bar({}) == ""


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
