"""Every scalar that a run logs: one table for the summary and report.html.

A tag is `group/name_unit`. A job on several machines logs the tags of `gpu<n>` and `host` of
the first one.
"""

import re
from collections.abc import Iterable
from functools import cache
from typing import Literal, NamedTuple

OverRun = Literal["seconds", "steps", "fresh_rows", "minimum", "maximum", "last"]
"""How the points of a tag become one value of the run. A field of `Throughput` is the weight of a mean: rows per second
weighted by seconds are all rows over all seconds."""

FED = "data wait and GPU activity, %"
RATES = "rows per second"
LOSS = "loss"
CPU = "CPU, % of all CPUs"
METRICS_PCT = "validation, %"


class Tag(NamedTuple):
    """One scalar, or one for each GPU (`<n>`) or metric (`<metric>`)."""

    name: str
    unit: str
    title: str = ""
    """Its name in the summary table. Empty: it is not in there."""
    chart: str = ""
    """The chart that it is drawn in. Empty: none of its own."""
    over_run: OverRun = "seconds"

    @property
    def pattern(self) -> str:
        """A regular expression that matches the names of this tag."""
        return self.name.replace("<n>", r"\d+").replace("<metric>", r"\w+")

    def names(self, logged: Iterable[str]) -> list[str]:
        """The logged names that belong to this tag."""
        return [name for name in logged if find_tag(name) is self]

    def title_of(self, name: str) -> str:
        """The title of one name: `SM activity, gpu0`; `validation top1_pct`."""
        group, _, metric = name.rpartition("/")
        if name == self.name or not self.title:
            return self.title or name
        if self.name == "val/<metric>":
            return f"{self.title} {metric}"
        return f"{self.title}, {group.removesuffix('/host')}"

    def chart_of(self, name: str) -> str:
        """The chart that one name is drawn in. Metrics share one only if their unit is known to be %."""
        if self.name != "val/<metric>":
            return self.chart
        return METRICS_PCT if name.endswith("_pct") else self.title_of(name)


TAGS = (
    Tag("data/wait_pct", "% of the time", title="data wait", chart=FED),
    Tag("data/fresh_rows_per_s", "rows/s", title="fresh rows", chart=RATES),
    Tag("train/trained_rows_per_s", "rows/s", title="trained rows", chart=RATES),
    Tag("train/step_ms", "ms, data wait included", title="step", over_run="steps"),
    Tag("data/echo", "times", over_run="fresh_rows"),
    Tag("train/loss", "", chart=LOSS, over_run="last"),
    Tag("train/lr", "", over_run="last"),
    Tag("val/loss", "", title="validation loss", chart=LOSS, over_run="last"),
    Tag("val/<metric>", "", title="validation", over_run="last"),
    Tag("gpu<n>/util_pct", "% of the time", title="GPU-Util", chart=FED),
    Tag("gpu<n>/util_min_pct", "% of the time", title="GPU-Util, minimum", chart=FED, over_run="minimum"),
    Tag("gpu<n>/sm_active_pct", "% of the SMs", title="SM activity", chart=FED),
    Tag("gpu<n>/tensor_active_pct", "% of the time", title="tensor cores"),
    Tag("gpu<n>/mem_used_gib", "GiB"),
    Tag("gpu<n>/mem_peak_gib", "GiB", title="GPU memory, peak of tensors", over_run="maximum"),
    Tag("gpu<n>/power_w", "W", title="GPU power", chart="GPU power, W"),
    Tag("gpu<n>/temperature_c", "°C"),
    Tag("host/cpu_user_pct", "% of all CPUs", title="CPU, user", chart=CPU),
    Tag("host/cpu_system_pct", "% of all CPUs", title="CPU, system", chart=CPU),
    Tag("host/cpu_iowait_pct", "% of all CPUs", title="CPU, waiting for disks", chart=CPU),
    Tag("host/rss_gib", "GiB", title="memory of the first process"),
    Tag("host/available_gib", "GiB"),
    Tag("host/disk_read_mb_per_s", "MB/s", title="disk reads", chart="disk reads, MB/s"),
)


@cache
def find_tag(name: str) -> Tag | None:
    """The first tag of the table that a logged name belongs to."""
    return next((tag for tag in TAGS if re.fullmatch(tag.pattern, name)), None)


def charts(logged: Iterable[str]) -> dict[str, list[str]]:
    """{title of a chart: the logged names in it}, in the order of the table."""
    drawn: dict[str, list[str]] = {}
    for tag in TAGS:
        for name in tag.names(logged):
            if title := tag.chart_of(name):
                drawn.setdefault(title, []).append(name)
    return drawn
