"""The start of the tools beside train.py."""

import sys

from support import PROJECT
from support.ranks import printed_by

STARTED = """
from fastgpu.process.tools import start_tool

start_tool()
start_tool()
print("a\\x1bb http://me:secret@host/x")
"""


def test_start_tool_twice_keeps_the_output(tmp_path):
    shown = printed_by([sys.executable, "-c", STARTED], tmp_path, PYTHONPATH=str(PROJECT))
    assert shown == "a\\x1bb http://host/x\n"
