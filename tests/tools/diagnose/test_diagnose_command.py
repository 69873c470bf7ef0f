"""The command line of diagnose.py: its own flags, and the words of train.py."""

import sys

import pytest

from fastgpu.diagnose.command import Diagnose, read
from fastgpu.process.launch import SharedError
from support import PROJECT
from support.ranks import printed_by


def test_diagnose_takes_the_words_of_train(folder):
    asked, config = read(["--json", "data.batch_size=8", "--config", "config.yaml", "--trace", "2", "run.name=b"])
    assert asked == Diagnose(json=True, trace=2)
    assert (config.data.batch_size, config.run.name) == (8, "b")


@pytest.mark.parametrize("words", ["--seconds 0", "--seconds nan", "--trace -1"])
def test_diagnose_refuses_numbers_without_a_meaning(folder, words):
    with pytest.raises(SharedError, match="^--seconds should be above 0, and --trace at least 0$"):
        read(words.split())


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("--lr 0.1", "--lr: write optim.lr=0.1"),
        ("--batch-size=64 --json", "--batch-size=64: write data.batch_size=64"),
        (
            "--seconds 1 --verbose",
            "--verbose: keys are words, such as optim.lr=0.1, and flags of torchrun come before ",
        ),
    ],
)
def test_diagnose_explains_unknown_flags_as_train(folder, words, text):
    with pytest.raises(SharedError, match=rf"^unknown flag {text}.*; python diagnose.py --help lists what it takes$"):
        read(words.split())


MISTAKES = """
import sys
from fastgpu.diagnose.command import read

for words in ("--seconds x", "--trace", "data.batch_size=0", "a.b=1", "--config none.yaml"):
    try:
        read(words.split())
    except ValueError as error:
        print(str(error).partition(";")[0])
sys.exit("torch" in sys.modules)
"""


def test_diagnose_mistakes_need_no_torch(folder):
    shown = printed_by([sys.executable, "-c", MISTAKES], folder, PYTHONPATH=str(PROJECT))
    assert shown.splitlines()[:2] == ["--seconds: invalid float value: 'x'", "--trace: expected one argument"]
    assert len(shown.splitlines()) == 5
