import errno
import json
import os
import shutil
import tempfile
from contextlib import suppress
from itertools import count, product
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from fastgpu.process.config import RunConfig
from fastgpu.process.launch import UserError
from fastgpu.run import checkpoint
from fastgpu.run.checkpoint import (
    Progress,
    find_intact,
    load,
    newest_first,
    not_finite,
    read_order,
    save,
    take_snapshot,
)
from fastgpu.run.run import lock_folder
from fastgpu.training.average import AveragedModel

ORDER = {"rows": 10, "seed": 0, "canonical_ranks": 8}


def parts(value: float = 0.0, model: nn.Module | None = None, kind: type = torch.optim.AdamW) -> dict[str, Any]:
    """A model with this value in each weight, and its optimizer."""
    model = model or nn.Linear(3, 2)
    for weight in model.parameters():
        nn.init.constant_(weight, value)
    return {"model": model, "optimizer": kind(model.parameters())}


def with_frozen_bias() -> dict[str, Any]:
    state = parts()
    return state | {"optimizer": torch.optim.AdamW([state["model"].weight])}


def save_step(
    run: Path, kind: checkpoint.Kind, step: int, *, same_model: Path | None = None, **progress: int
) -> Path | None:
    """Save a checkpoint whose weights are the number of its step."""
    snapshot, card = take_snapshot(parts(step)), {"order": ORDER}
    return save(run, kind, Progress(step=step, **progress), snapshot, card=card, same_model=same_model)


def save_both(run: Path, step: int) -> Path | None:
    """Save a step that is the best one and the last one. Returns the path of the last one."""
    return save_step(run, "last", step, same_model=save_step(run, "best", step))


def resume(run: Path, state: dict[str, Any] | None = None, order: dict[str, Any] = ORDER) -> tuple[int, float]:
    """Load the newest intact checkpoint, as a run does. Returns its step, and a weight."""
    state = state or parts()
    return load(find_intact(run), state, order).step, state["model"].weight[0, 0].item()


@pytest.fixture
def run(tmp_path) -> Path:
    (tmp_path / "checkpoints").mkdir()
    return tmp_path


def write_state(path: Path, state: dict[str, Any]) -> None:
    """Write a state.json that was changed, with its new checksum."""
    state.pop("digest", None)
    path.write_text(json.dumps(state | {"digest": checkpoint.checksum_of(state)}))


def names(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def test_checkpoint_look_for_nan_reads_once(monkeypatch):
    """On a GPU, the host waits for the device whenever it reads a value."""
    state = parts()
    state["model"].bias.data[1] = torch.inf
    state["model"].register_buffer("empty", torch.empty(0))
    monkeypatch.setattr(torch.Tensor, "__bool__", Mock(side_effect=AssertionError))
    monkeypatch.setattr(torch.Tensor, "item", Mock(side_effect=AssertionError))
    assert not_finite(state) == {"['model']['bias']"}
    assert not_finite({}) == set()


@pytest.mark.parametrize("has_links", [True, False])
def test_checkpoint_best_and_last_share_the_model(run, monkeypatch, has_links):
    """It is written once. Each outlives the other. A file system without hard links has a copy."""
    monkeypatch.setattr(checkpoint, "save_model", Mock(side_effect=checkpoint.save_model))
    if not has_links:
        monkeypatch.setattr(os, "link", Mock(side_effect=PermissionError(1, "Operation not permitted")))
    last = save_both(run, 1)
    (best,) = newest_first(run, "best")
    assert checkpoint.save_model.call_count == 1
    for name in ("model.json", "model.safetensors"):
        assert (last / name).stat().st_nlink == (2 if has_links else 1)
        assert (last / name).stat().st_mode == (best / name).stat().st_mode
    shutil.rmtree(best)
    assert read(last)[1]["bias"][0] == 1 == resume(run)[1]


def test_checkpoint_links_to_nothing_on_a_full_disk(run, monkeypatch, capsys):
    save_both(run, 1)
    monkeypatch.setattr(os, "link", Mock(side_effect=OSError(95, "Operation not supported")))
    monkeypatch.setattr(shutil, "copy", Mock(side_effect=OSError(28, "No space left on device")))
    assert save_both(run, 2) is None
    assert "last-000004 was not written: [Errno 28] No space left" in capsys.readouterr().out
    assert names(run) == ["best-000003", "last-000002"]
    assert resume(run) == (1, 1.0)


def test_checkpoint_snapshot_copies_once():
    """Weights that two modules share are one tensor, and what torch adds to a state_dict is kept."""
    layers = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2), nn.Linear(2, 2))
    layers[2].weight = layers[1].weight
    state = {"model": layers, "ema": AveragedModel(layers, 0.9)}
    snapshot = take_snapshot(state)
    weights = snapshot.state_dicts["model"]
    assert weights["1.weight"] is weights["2.weight"]
    assert weights._metadata == layers.state_dict()._metadata
    assert snapshot.model_to_use.keys() == weights.keys()
    assert snapshot.model_to_use["1.bias"] is snapshot.state_dicts["ema"]["module.1.bias"]
    assert snapshot.classes == {"model": "Sequential", "ema": "AveragedModel"}


def test_checkpoint_keeps_the_newest_of_a_kind(run):
    others = {"last-final", "last-000001.old", "last-000001 (copy)", "last-٣٣٣"}
    for name in others:
        (run / "checkpoints" / name).mkdir()
    for kind, step in (("last", 9), ("last", 9), ("last", 10), ("best", 9), ("best", 10)):
        save_step(run, kind, step)
    assert {*names(run)} == others | {"best-000005", "last-000002", "last-000003"}  # the number counts saves
    (run / "checkpoints/last-000003").rename(run / "checkpoints/last-999999")
    save_step(run, "last", 11)
    assert {*names(run)} == others | {"best-000005", "last-1000000", "last-999999"}
    assert resume(run) == (11, 11.0)


def read(path: Path) -> tuple[int, dict[str, torch.Tensor]]:
    """The step of a checkpoint of any kind, and the model to use. Fails if a file does not match its checksum."""
    content = json.loads((path / "state.json").read_text())
    assert content.pop("digest") == checkpoint.checksum_of(content)
    assert {name: checkpoint.checksum_of_file(path / name) for name in content["sha256"]} == content["sha256"]
    return content["progress"]["step"], load_file(path / checkpoint.WEIGHTS)


def test_checkpoint_best_has_what_is_read_of_it(run):
    """A run is resumed from the last one only. Of a large model, the optimizer is two thirds of the bytes."""
    save_step(run, "best", 1)
    path = newest_first(run, "best")[0]
    assert {each.name for each in path.iterdir()} == {"model.json", "model.safetensors", "state.json"}
    assert read(path)[0] == 1


class Killed(BaseException):
    """Stands for SIGKILL: no handler catches it."""


CALLS = (
    *((torch, "save"), (Path, "write_text"), (Path, "rename"), (Path, "replace")),
    *((os, "link"), (os, "fsync"), (os, "rmdir")),
)
KINDS = {"last": ["last"], "best": ["best"], "both": ["best", "last"]}


@pytest.mark.parametrize("case", KINDS)
def test_checkpoint_survives_a_kill_at_any_call(tmp_path, monkeypatch, case):
    def save_case(run: Path, step: int) -> Path | None:
        return save_both(run, step) if case == "both" else save_step(run, case, step)

    for at in count():
        run = tmp_path / str(at)
        (run / "checkpoints").mkdir(parents=True)
        save_case(run, 1)
        calls = Mock(side_effect=[None] * at + [Killed] + [None] * 99)

        def deadly(function, calls=calls):
            return lambda *arguments, **options: (calls(), function(*arguments, **options))[1]

        with monkeypatch.context() as patch:
            for owner, name in CALLS:
                patch.setattr(owner, name, deadly(getattr(owner, name)))
            with suppress(Killed):
                save_case(run, 2)
        steps = []
        for kind in KINDS[case]:
            step, weights = read(newest_first(run, kind)[0])
            assert weights["bias"][0] == step in (1, 2)
            steps.append(step)
        assert steps == sorted(steps, reverse=True)  # the best one is never older than the last one
        lock_folder(RunConfig(folder=str(tmp_path), name=run.name, resume="auto"))[1].close()  # as the next start does
        for later in (2, 3):  # the next saves work, and nothing is left over
            assert save_case(run, later)
        assert len(names(run)) == sum(checkpoint.KEPT[kind] for kind in KINDS[case])
        if calls.call_count <= at:
            assert at > 8
            return


@pytest.mark.parametrize(
    ("owner", "name", "error"),
    [
        (torch, "save", RuntimeError("unexpected pos 704 vs 598")),
        (checkpoint, "save_model", SafetensorError("No space left on device")),
        (tempfile, "mkdtemp", OSError(30, "Read-only file system")),
    ],
)
def test_checkpoint_lost_to_a_full_disk(run, monkeypatch, capsys, owner, name, error):
    save_step(run, "last", 1)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, Mock(side_effect=error))
        assert not save_step(run, "last", 2)
    out = capsys.readouterr().out
    assert "last-000002 was not written: " in out
    assert f"make room in {run}" in out
    assert names(run) == ["last-000001"]
    assert save_step(run, "last", 3)
    assert names(run) == ["last-000001", "last-000002"]


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        *product(("model.pt", "state.json"), ("flip", "cut", "nested", "remove", "endless")),
        *product(["state.json"], ("another format", "no files", "a file elsewhere")),
    ],
)
def test_checkpoint_damage_is_found(run, capsys, file, damage):
    for step in (1, 2):
        save_step(run, "last", step)
    path = run / "checkpoints/last-000002" / file
    content = path.read_bytes()
    middle = len(content) // 2
    damaged = {
        "flip": content[:middle] + bytes([content[middle] ^ 255]) + content[middle + 1 :],
        "cut": content[:middle],
        "nested": b"[" * 99_999,
        "another format": content.replace(b'"format": 6', b'"format": 7'),
    }
    path.write_bytes(damaged.get(damage, b""))
    if damage in ("no files", "a file elsewhere"):  # with a checksum that fits
        write_state(path, json.loads(content) | {"sha256": {"/dev/zero": ""} if damage == "a file elsewhere" else {}})
    if damage in ("remove", "endless"):
        path.unlink()
    if damage == "endless":
        path.symlink_to("/dev/zero")
    assert resume(run) == (1, 1.0)
    assert "is damaged" in capsys.readouterr().out
    save_step(run, "last", 3)
    assert names(run) == ["damaged-last-000002", "last-000001", "last-000002"]


def test_checkpoint_damaged_is_renamed_whatever_is_in_the_way(run):
    for step in (1, 2, 3):
        save_step(run, "last", step)
    (run / "checkpoints/last-000003/state.json").unlink()
    (run / "checkpoints/last-000004").symlink_to("nowhere")
    (run / "checkpoints/damaged-last-000003").symlink_to("last-000002")
    (run / "checkpoints/damaged-last-000004").mkdir()
    assert resume(run) == (2, 2.0)
    assert names(run) == ["damaged-last-000003", "damaged-last-000004", "last-000002"]
    assert not (run / "checkpoints/damaged-last-000003").is_symlink()


def test_checkpoint_that_cannot_be_renamed_is_one_line(run, monkeypatch):
    save_step(run, "last", 1)
    (run / "checkpoints/last-000001/state.json").unlink()
    monkeypatch.setattr(Path, "rename", Mock(side_effect=PermissionError(13, "Permission denied")))
    with pytest.raises(UserError, match=r"last-000001 cannot be renamed \(Permission denied\); rename it"):
        find_intact(run)


def test_checkpoint_folder_is_made_again(run):
    save_step(run, "last", 1)
    shutil.rmtree(run / "checkpoints")
    assert save_step(run, "last", 2)
    assert resume(run) == (2, 2.0)


def test_checkpoint_none_intact_or_of_another_version(run):
    save_step(run, "last", 1)
    write_state(run / "checkpoints/last-000001/state.json", {"format": checkpoint.FORMAT - 1})
    with pytest.raises(UserError, match=r"last-000001 is of another version: resume it with that version"):
        resume(run)
    (run / "checkpoints/last-000001/state.json").unlink()
    with pytest.raises(UserError, match="none of its checkpoints is intact; restore one, or use another run.name"):
        resume(run)


def test_checkpoint_code_is_not_run(run):
    class Attack:
        def __reduce__(self):
            return (Path.touch, (run / "ran",))

    save_step(run, "last", 1)
    path = run / "checkpoints/last-000001/model.pt"
    torch.save({"weight": Attack()}, path)
    state = path.with_name("state.json")
    content = json.loads(state.read_text())
    write_state(state, content | {"sha256": content["sha256"] | {"model.pt": checkpoint.checksum_of_file(path)}})
    with pytest.raises(UserError, match=r"model.pt does not fit: .*[Ww]eights"):
        resume(run)
    assert not (run / "ran").exists()


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (parts(model=nn.ModuleList([nn.Linear(3, 2)] * 99)), 'model.pt does not fit: .*Missing .*: "0.weight".*'),
        (parts() | {"optimizer": torch.optim.AdamW([torch.zeros(2)])}, "optimizer.pt does not fit: .*"),
        (parts(kind=torch.optim.SGD), "optimizer.pt does not fit: it is of AdamW"),
        (with_frozen_bias(), "optimizer.pt does not fit: other parameters train today; docs/code.md .*a new run .*"),
        (parts() | {"ema": AveragedModel(nn.Linear(3, 2), 0.9)}, "ema.pt does not fit: .*No such file.*"),
    ],
)
def test_checkpoint_of_another_model_is_one_line(run, state, message):
    save_step(run, "last", 1)
    with pytest.raises(UserError, match=rf"last-000001/{message}$") as error:
        resume(run, state)
    assert len(str(error.value)) - len(str(run)) < 300


def test_checkpoint_read_errors_are_no_damage(run, monkeypatch):
    save_step(run, "last", 1)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "checksum_of_file", Mock(side_effect=OSError(errno.EIO, "Input/output error", "x")))
        with pytest.raises(UserError, match=r"cannot read x \(Input/output error\); start again"):
            find_intact(run)
        patch.setattr(checkpoint, "checksum_of_file", Mock(side_effect=MemoryError))
        with pytest.raises(MemoryError):
            find_intact(run)
    assert resume(run)[0] == 1


@pytest.mark.parametrize(("was_fp16", "is_fp16", "scale"), [(False, True, 65536), (True, False, 1), (True, True, 8)])
def test_checkpoint_of_another_precision(run, was_fp16, is_fp16, scale):
    """Such as by train.precision=auto on an older GPU: fp16 begins with its first scale."""
    scalers = [torch.amp.GradScaler("cpu", 8.0, enabled=was_fp16), torch.amp.GradScaler("cpu", enabled=is_fp16)]
    save(run, "last", Progress(), take_snapshot(parts() | {"scaler": scalers[0]}), card={"order": ORDER})
    load(find_intact(run), parts() | {"scaler": scalers[1]}, ORDER)
    assert scalers[1].get_scale() == scale


def test_checkpoint_of_another_order_of_rows(run):
    changed = ORDER | {"seed": 1, "content": "b"}
    save_step(run, "last", 1, epoch_step=1)
    with pytest.raises(UserError, match=r"inside an epoch, in which .* cannot change \(seed, content\)$"):
        resume(run, order=changed)
    with pytest.raises(UserError, match=r"canonical_ranks\); use data.canonical_ranks=auto and ranks that divide 8$"):
        resume(run, order=ORDER | {"canonical_ranks": 12})
    save_step(run, "last", 2)
    assert resume(run, order=changed) == (2, 2.0)


def test_checkpoint_order_is_that_of_the_newest_intact(run):
    assert read_order(run) == {}
    save_step(run, "last", 1)
    save_step(run, "last", 2)
    assert read_order(run) == ORDER
    (run / "checkpoints/last-000002/state.json").write_text("{")
    assert read_order(run) == ORDER
    (run / "checkpoints/last-000001/model.json").write_text('{"order": {}}')
    assert read_order(run) == {}
