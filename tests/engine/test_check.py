"""`run.check=true` says what would stop a run, and leaves nothing behind."""

import pytest
import train as script
from harness import ALONE, run_train

from fastgpu.process.config_loader import load_config
from fastgpu.process.launch import UserError


def check(*words: str) -> None:
    script.build(load_config(["run.check=true", *words]), ALONE)


def test_what_is_checked_is_printed_and_nothing_is_started(folder, capsys):
    check()
    printed = capsys.readouterr().out
    assert "batches: 32 rows over all ranks" in printed
    assert not (folder / "runs").exists()


@pytest.mark.parametrize(
    "word", ["data.train=none.h5", "data.batch_size=100000", "model.hidden_dim=wide", "optim.accumulation_steps=5"]
)
def test_a_mistake_has_the_message_of_training(folder, word):
    with pytest.raises(UserError) as of_check:
        check(word)
    with pytest.raises(UserError) as of_training:
        script.train(script.build(load_config([word]), ALONE), ALONE)
    assert str(of_check.value) == str(of_training.value)


@pytest.mark.slow
def test_the_exit_code_is_that_of_a_mistake(folder):
    good = run_train("run.check=true", cwd=folder)
    assert good.returncode == 0, good.stderr
    bad = run_train("data.batch_size=40", "optim.accumulation_steps=16", "run.check=true", cwd=folder)
    assert bad.returncode == 2
    assert bad.stderr.startswith("error: data.batch_size is 40")
    assert len(bad.stderr.splitlines()) == 1
