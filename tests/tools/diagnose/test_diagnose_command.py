"""The command line of diagnose.py: its own flags, and the words of train.py."""

import re
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


@pytest.mark.parametrize("words", [["--second", "1"], ["--lr=0.1"], ["--seconds", "1", "--verbose"]])
def test_diagnose_names_its_flags(folder, words):
    flag = words[-1] if len(words) > 2 else words[0]
    text = f"unknown flag {flag}; diagnose.py takes --seconds S, --json, --trace N, --config FILE and keys such as "
    with pytest.raises(SharedError, match=re.escape(text)):
        read(words)


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
