import re

import numpy as np
from PIL import Image

from fastgpu.diagnose.plot import BAR, GAP, LEFT, TOP, Bar, write_bars

BARS = [Bar("one <b>", 100.0, "100 rows/s", "#ff0000"), Bar("half", 50.0, "50 rows/s", "#0000ff")]


def test_a_page_has_every_bar_in_proportion(tmp_path):
    write_bars(tmp_path / "x.html", "title & all", BARS)
    page = (tmp_path / "x.html").read_text()
    widths = [float(width) for width in re.findall(r'<rect [^>]*width="([\d.]+)"', page)]
    assert widths[0] == 2 * widths[1]
    assert "one &lt;b&gt;" in page
    assert "title &amp; all" in page
    assert "http" not in page.replace("http://www.w3.org", "")


def test_a_picture_has_every_bar_in_proportion(tmp_path):
    write_bars(tmp_path / "x.png", "title", BARS)
    image = np.asarray(Image.open(tmp_path / "x.png").convert("RGB")).astype(int)
    red = (image[TOP + BAR // 2] == (255, 0, 0)).all(axis=1).sum()
    blue = (image[TOP + BAR + GAP + BAR // 2] == (0, 0, 255)).all(axis=1).sum()
    assert abs(red - 2 * blue) <= 2
    assert (image[TOP + 5, LEFT + 5] == (255, 0, 0)).all()
