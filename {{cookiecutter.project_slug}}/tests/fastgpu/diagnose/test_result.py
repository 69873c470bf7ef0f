import json
import re

import pytest

from fastgpu.diagnose import result
from fastgpu.diagnose.preflight import Finding
from fastgpu.diagnose.verdict import Facts, Measured, Rounds, Verdict, judge
from fastgpu.process.launch import UserError
from fastgpu.telemetry.ceiling import read_ceiling, read_summary

CONFIG = {"workload": "mine", "data.batch_size": 64, "loader.num_readers": 2, "model.shape": (3, 4)}
MACHINE = {"device": "CPU process", "world_size": 1, "local_world_size": 1, "row_bytes": 72}
SUBJECT = result.Subject("1 CPU process", MACHINE, CONFIG)
SLOW = Measured(64, Rounds((0.01,) * 3), Rounds((0.04,) * 3), supply=Rounds((0.04,) * 3), cached=Rounds((0.001,) * 3))
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
    fed = Measured(64, Rounds((0.01,) * 3), Rounds((0.01,) * 3), busy_s=0.009)
    text = result.table("title", fed, judge(fed, Facts()))
    assert "device busy, part of compute" in text
    assert "change" not in text


def test_bars_are_the_parts_in_proportion_and_the_loop_stands_out():
    page = result.bars_page("title & all", SLOW)
    widths = [float(width) for width in re.findall(r'<rect [^>]*width="([\d.]+)"', page)]
    speeds = [6400, 64_000, 1600, 1600]
    assert widths == pytest.approx([widths[1] * speed / max(speeds) for speed in speeds], abs=0.1)
    assert all(f">{name}<" in page for name in result.ceilings(SLOW))
    assert "6,400 rows/s" in page
    assert re.findall(r'fill="(#\w+)"', page) == ["#2563eb"] * 3 + ["#dc2626"]
    assert "title &amp; all" in page
    assert "http" not in page


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
