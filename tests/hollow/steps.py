"""Runs train.py, and writes how often each call of CUDA was made in each step, to OUT.<rank>.

python steps.py OUT train.py ...        or by torchrun; PYTHONPATH is the folder of train.py
"""

import ctypes
import json
import os
import runpy
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path

import torch

from fastgpu.process import seeds

reseed = seeds.reseed
counts_text = ctypes.CDLL(None).hollow_counts
counts_text.restype = ctypes.c_char_p
counts: list[Counter[str]] = []


def counting_reseed(*arguments: int) -> torch.Generator:
    """`reseed`, which begins each step."""
    lines = counts_text().decode().splitlines()
    pairs = (line.removeprefix("count ").split("\t") for line in lines)
    counts.append(Counter({call: int(number) for call, number in pairs}))
    return reseed(*arguments)


out, script, *_ = sys.argv[1:]
sys.argv = sys.argv[2:]
seeds.reseed = counting_reseed
try:
    runpy.run_path(script, run_name="__main__")
finally:
    steps = [later - earlier for earlier, later in pairwise(counts)]
    Path(f"{out}.{os.environ.get('RANK', '0')}").write_text(json.dumps(steps))
