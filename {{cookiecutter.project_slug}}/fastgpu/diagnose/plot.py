"""A picture of bars: an HTML page that needs no network, or a PNG."""

import html
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from PIL import Image, ImageDraw, ImageFont

WIDTH, BAR, GAP, LEFT, RIGHT, TOP = 900, 26, 12, 250, 150, 60
INK = "#0f172a"


class Bar(NamedTuple):
    """One bar: its length, and what is written beside it."""

    name: str
    value: float
    text: str
    colour: str = "#2563eb"


def write_bars(path: Path, title: str, bars: Sequence[Bar]) -> None:
    """Draw them into `path`, *.png or *.html. Raises OSError."""
    height = TOP + len(bars) * (BAR + GAP)
    longest = max(bar.value for bar in bars)
    places = [
        (bar, TOP + number * (BAR + GAP), (WIDTH - LEFT - RIGHT) * bar.value / longest)
        for number, bar in enumerate(bars)
    ]
    if path.suffix == ".png":
        image = Image.new("RGB", (WIDTH, height), "white")
        draw, font = ImageDraw.Draw(image), ImageFont.load_default(14)
        draw.text((10, 16), title, INK, ImageFont.load_default(17))
        for bar, y, length in places:
            draw.text((LEFT - 10, y + BAR / 2), bar.name, INK, font, anchor="rm")
            draw.rectangle((LEFT, y, LEFT + length, y + BAR), bar.colour)
            draw.text((LEFT + length + 8, y + BAR / 2), bar.text, INK, font, anchor="lm")
        image.save(path)
        return
    parts = [f'<text x="10" y="30" font-size="17" font-weight="600">{html.escape(title)}</text>']
    for bar, y, length in places:
        middle = y + BAR / 2 + 5
        parts.append(
            f'<text x="{LEFT - 10}" y="{middle}" text-anchor="end">{html.escape(bar.name)}</text>'
            f'<rect x="{LEFT}" y="{y}" width="{length:.1f}" height="{BAR}" fill="{bar.colour}"/>'
            f'<text x="{LEFT + length + 8:.1f}" y="{middle}">{html.escape(bar.text)}</text>'
        )
    page = (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{html.escape(title)}</title>"
        f'<svg viewBox="0 0 {WIDTH} {height}" style="max-width: {WIDTH}px; width: 100%; font: 14px system-ui; '
        f'fill: {INK}" role="img">{"".join(parts)}</svg></html>\n'
    )
    path.write_text(page, encoding="utf-8")
