"""The page docs/measuring.md of a project explains every scalar of a run, as the project's table of tags has them."""

import re

import pytest
from template import PROJECT

PAGE = PROJECT / "docs/measuring.md"


def test_the_page_explains_exactly_the_table_of_tags(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(PROJECT))
    from fastgpu.report.tags import TAGS

    rows = re.findall(r"(?m)^\| `([^`|]+/[^`|]+)` \| ([^|]*) \| ([^|]+) \| [^|]*\|$", PAGE.read_text(encoding="utf-8"))
    assert [(name, unit.strip()) for name, unit, _ in rows] == [(tag.name, tag.unit) for tag in TAGS]
    assert all(meaning.strip() for _, _, meaning in rows)
