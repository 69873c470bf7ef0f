"""Horizontal bars as an HTML page that needs no network."""

import html
from collections.abc import Sequence
from typing import NamedTuple

WIDTH = 900
BAR_HEIGHT = 26
BAR_STEP = 38
LEFT = 250
RIGHT = 150
TOP = 60


class Bar(NamedTuple):
    """One bar: its name on the left, its length, and the text on its right."""

    name: str
    value: float
    text: str
    color: str = "#2563eb"


def bars_page(title: str, bars: Sequence[Bar]) -> str:
    """The text of the page."""
    px_per_unit = (WIDTH - LEFT - RIGHT) / max(bar.value for bar in bars)
    shapes = [f'<text x="10" y="30" font-size="17" font-weight="600">{html.escape(title)}</text>']
    for number, bar in enumerate(bars):
        y = TOP + number * BAR_STEP
        baseline = y + BAR_HEIGHT / 2 + 5
        length = bar.value * px_per_unit
        shapes.append(
            f'<text x="{LEFT - 10}" y="{baseline}" text-anchor="end">{html.escape(bar.name)}</text>'
            f'<rect x="{LEFT}" y="{y}" width="{length:.1f}" height="{BAR_HEIGHT}" fill="{bar.color}"/>'
            f'<text x="{LEFT + length + 8:.1f}" y="{baseline}">{html.escape(bar.text)}</text>'
        )
    height = TOP + len(bars) * BAR_STEP
    style = f"max-width: {WIDTH}px; width: 100%; font: 14px system-ui; fill: #0f172a"
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{html.escape(title)}</title>"
        f'<svg viewBox="0 0 {WIDTH} {height}" style="{style}" role="img">{"".join(shapes)}</svg></html>\n'
    )
