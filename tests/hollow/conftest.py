"""These tests run where tests/hollow/run.py has preloaded the stand-in for GPUs."""

import ctypes

import pytest


@pytest.fixture(scope="session", autouse=True)
def stand_in() -> None:
    assert hasattr(ctypes.CDLL(None), "hollow_counts"), "there is no stand-in for GPUs: use make hollow"
