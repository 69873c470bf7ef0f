import json

import pytest

from fastgpu.diagnose import result
from fastgpu.diagnose.preflight import Finding
from fastgpu.diagnose.verdict import Facts, Measured, Timing, Verdict, judge
from fastgpu.process.launch import UserError
from fastgpu.telemetry.ceiling import read_ceiling, read_summary

CONFIG = {"workload": "mine", "data.batch_size": 64, "loader.num_readers": 2, "model.shape": (3, 4)}
MACHINE = {"device": "CPU process", "world_size": 1, "local_world_size": 1, "row_bytes": 72}
SUBJECT = result.Subject("1 CPU process", MACHINE, CONFIG)
SLOW = Measured(64, Timing((0.01,) * 3), Timing((0.04,) * 3), supply=Timing((0.04,) * 3), cached=Timing((0.001,) * 3))
VERDICT = judge(SLOW, Facts())


def test_the_table_has_every_part_and_one_verdict():
    lines = result.table("title", SLOW, VERDICT).splitlines()
    assert len(lines) <= 15
    assert lines[0] == "title"
    parts = [line.split("  ")[1] for line in lines[2:6]]
    assert parts == ["compute", "supply from the page cache", "supply", "the training loop"]
    assert lines[2].split()[1:] == ["10.000", "6,400", "1.00", "x", "+-0", "%"]
    assert "feed ratio 0.250 [0.250 to 0.250]" in lines
    assert any(line.startswith("READ: the loop waits for bytes from storage (98 %") for line in lines)
    assert "  change    data.echo=4" in lines
    assert "  gain      4.00 x the speed, predicted; confidence: high" in lines


def test_the_table_of_a_fed_gpu_shows_its_work_and_no_change():
    fed = Measured(64, Timing((0.01,) * 3), Timing((0.01,) * 3), busy_s=0.009)
    text = result.table("title", fed, judge(fed, Facts()))
    assert "device busy, part of compute" in text
    assert "change" not in text


def test_bars_are_the_parts_and_the_loop_stands_out():
    bars = {bar.name: bar for bar in result.bars(SLOW)}
    assert list(bars) == list(result.ceilings(SLOW))
    assert (bars["compute"].value, bars["compute"].text) == (6400, "6,400 rows/s")
    assert len({bar.color for bar in bars.values()}) == 2


def test_numbers_survive_json():
    findings = [Finding("versions", "python 3")]
    numbers = json.loads(json.dumps(result.as_json(SUBJECT, SLOW, VERDICT, findings)))
    assert numbers["feed_ratio"] == 0.25
    assert numbers["compute_rows_per_s"] == 6400
    assert numbers["ceilings"]["supply"]["rows_per_s"] == 1600
    assert numbers["verdict"]["overrides"] == {"data.echo": 4}
    assert Verdict(**numbers["verdict"]) == VERDICT
    assert Finding(**numbers["preflight"][0]) == findings[0]


def test_later_runs_read_what_is_written(tmp_path):
    numbers = result.as_json(SUBJECT, SLOW, VERDICT, [])
    result.keep(tmp_path / "runs", numbers)
    folder = tmp_path / "runs"
    assert read_ceiling(folder, MACHINE, CONFIG) == 6400
    assert "READ: the loop waits for bytes" in read_summary(folder, CONFIG)
    assert "change: data.echo=4, 4.00 x the speed" in read_summary(folder, CONFIG)
    noisy = VERDICT._replace(cause="INCONCLUSIVE")
    numbers = result.as_json(SUBJECT, SLOW, noisy, [])
    result.keep(tmp_path / "runs", numbers)
    assert read_ceiling(folder, MACHINE, CONFIG) is None
    assert read_summary(folder, CONFIG) == ""


def test_a_folder_that_cannot_be_made_is_an_error_with_its_name(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot write .*file/x.json"):
        result.save(tmp_path / "file" / "x.json", lambda path: path.write_text(""))


def test_a_diagnosis_that_cannot_be_kept_is_a_warning(tmp_path, capsys):
    (tmp_path / "file").touch()
    result.keep(tmp_path / "file", {})
    assert "warning: later runs will not know this diagnosis: cannot write" in capsys.readouterr().out
