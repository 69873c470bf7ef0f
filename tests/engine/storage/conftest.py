"""Fixtures that decide what the page cache holds."""

import math

import pytest

from fastgpu.storage import file as file_module
from fastgpu.storage import store


@pytest.fixture
def nothing_cached(monkeypatch) -> None:
    """No byte is in the page cache, so all rows are read by system calls."""
    monkeypatch.setattr(file_module, "is_in_page_cache", lambda descriptor, offset: False)


@pytest.fixture
def all_cached(monkeypatch) -> None:
    """Every byte is in the page cache."""
    monkeypatch.setattr(file_module, "is_in_page_cache", lambda descriptor, offset: True)


@pytest.fixture(params=["cached", "not cached", "around the page cache"])
def either_cached_or_not(request, monkeypatch) -> None:
    """All bytes are in the page cache, so rows are copied out of a mapping; then the same with none, and without it."""
    is_cached = request.param == "cached"
    monkeypatch.setattr(store, "AROUND_PAGE_CACHE", 0.0 if request.param == "around the page cache" else math.inf)
    monkeypatch.setattr(file_module, "is_in_page_cache", lambda descriptor, offset: is_cached)
