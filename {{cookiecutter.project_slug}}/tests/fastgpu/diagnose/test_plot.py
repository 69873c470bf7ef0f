import re

from fastgpu.diagnose.plot import Bar, bars_page

BARS = [Bar("one <b>", 100.0, "100 rows/s", "#ff0000"), Bar("half", 50.0, "50 rows/s", "#0000ff")]


def test_a_page_has_every_bar_in_proportion():
    page = bars_page("title & all", BARS)
    whole, half = (float(width) for width in re.findall(r'<rect [^>]*width="([\d.]+)"', page))
    assert whole == 2 * half
    assert "one &lt;b&gt;" in page
    assert "title &amp; all" in page
    assert "http" not in page
