from pathlib import Path

import numpy as np
import pytest
from harness import ALONE, in_world

from fastgpu.process.launch import UserError
from fastgpu.process.world import World
from fastgpu.run.damaged import LIST, DamagedRows
from fastgpu.storage.arrays import Arrays


def source(*damaged: int, n_rows: int = 1000) -> Arrays:
    """A source of which some rows are damaged."""
    rows = Arrays("a.h5", {"x": np.zeros((n_rows, 1))}, {}, block_rows=np.array([n_rows], np.int32), n_items={})
    rows.damaged = {row: text(row) for row in damaged}
    return rows


def text(row: int) -> str:
    return f"a.h5: the image in row {row} cannot be decoded"


def listed(folder: Path) -> list[str]:
    return (folder / LIST).read_text().splitlines()


def test_rows_are_printed_once_and_listed(tmp_path, capsys):
    train, val = source(7), source(7)
    damaged = DamagedRows((train, val), ALONE)
    damaged.tell(tmp_path)
    lines = [
        f"data.train: {text(7)}; the next row is trained on in its place",
        f"data.val: {text(7)}; it is left out of the metrics",
    ]
    assert listed(tmp_path) == lines
    printed = [f"warning: {line}" for line in lines]
    assert capsys.readouterr().out.splitlines() == [
        *printed,
        f"warning: damaged rows so far: 2; {tmp_path / LIST} lists them",
    ]
    damaged.tell(tmp_path)
    assert capsys.readouterr().out == ""
    train.damaged[3] = text(3)
    damaged.tell(tmp_path)
    assert "row 3 " in listed(tmp_path)[2]
    assert damaged.summary == f"damaged rows so far: 3; {tmp_path / LIST} lists them"


def test_a_handful_is_printed_and_all_are_listed(tmp_path, capsys):
    DamagedRows((source(*range(9)), source()), ALONE).tell(tmp_path)
    assert capsys.readouterr().out.count("the next row") == 5
    assert len(listed(tmp_path)) == 9


def test_a_resumed_run_adds_to_the_list(tmp_path, capsys):
    DamagedRows((source(1, 2), source()), ALONE).tell(tmp_path)
    capsys.readouterr()
    resumed = DamagedRows((source(2, 5), source()), ALONE)
    resumed.tell(tmp_path)
    assert [line.split()[6] for line in listed(tmp_path)] == ["1", "2", "5"]
    output = capsys.readouterr().out
    assert "row 5 " in output
    assert "so far: 2" in resumed.summary


def test_nothing_is_written_without_a_folder_or_without_damage(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    DamagedRows((source(), source()), ALONE).tell(tmp_path)
    DamagedRows((source(4), source()), ALONE).tell()
    assert [*tmp_path.iterdir()] == []
    assert "row 4 " in capsys.readouterr().out


def test_a_list_that_cannot_be_written_is_said_and_training_goes_on(tmp_path, capsys):
    (tmp_path / LIST).mkdir()
    DamagedRows((source(4), source()), ALONE).tell(tmp_path)
    assert "cannot write" in capsys.readouterr().out


def tell_on_ranks(world: World, folder: str) -> str:
    """The error of too many rows, after a call without new rows and one in which the ranks have found other rows."""
    rows = source(*(10, 11) if world.rank else (11,), n_rows=100)
    damaged = DamagedRows((rows, source(n_rows=200)), world)
    for _ in range(2):
        damaged.tell(Path(folder))
    rows.damaged[12 + world.rank] = text(12 + world.rank)
    try:
        damaged.tell(Path(folder))
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.slow
def test_the_rows_of_all_ranks_are_listed_and_counted(tmp_path):
    expected = f"more than 1 % of the rows are damaged (4); {tmp_path / LIST} lists them"
    assert in_world(2, tell_on_ranks, str(tmp_path)) == [expected] * 2
    assert [line.split()[6] for line in listed(tmp_path)] == ["11", "10", "12", "13"]
