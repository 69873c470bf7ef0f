"""The page docs/measuring.md of a project explains the scalars of a run as the project's table of tags has them."""

import re

import pytest
from template import PROJECT

PAGE = PROJECT / "docs/measuring.md"


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.syspath_prepend(str(PROJECT))
    from fastgpu.telemetry.tags import markdown_table

    return markdown_table()


def test_the_page_lists_exactly_the_table_of_tags(table: str) -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert table in page, "run `python -m fastgpu.telemetry.tags` in the project and paste what it prints"
    elsewhere = page.replace(table, "")
    assert not re.search(r"^\| `(train|data|val|gpu<n>|host)/", elsewhere, re.MULTILINE)
