"""Every scalar that a run logs: one table for TensorBoard's charts, the summary and report.html.

A tag is `group/name_unit`. A job on several machines logs the tags of `gpu<n>` and `host` once for each machine, those
of the second one as `machine1/host/...`. `python -m fastgpu.telemetry.tags` prints a table that explains them.
"""

import re
from collections.abc import Iterable
from functools import cache
from typing import Literal, NamedTuple

OverRun = Literal["seconds", "steps", "fresh_rows", "trained_rows", "minimum", "maximum", "last"]
"""How the points of a tag become one value of the run. A field of `Throughput` is the weight of a mean: rows per second
weighted by seconds are all rows over all seconds."""

FED = "data wait and GPU activity, %"
RATES = "rows per second"
LOSS = "loss"
CPU = "CPU, % of all CPUs"
DISK = "disk reads, MB/s"
PAGE_CACHE = "page cache refaults, pages/s"
CLOCKS = "GPU clocks held down, % of the time"
POWER = "GPU power, W"
METRICS_PCT = "validation, %"


class Tag(NamedTuple):
    """One scalar, or one for each GPU (`<n>`) or metric (`<metric>`)."""

    name: str
    unit: str
    title: str = ""
    """Its name in the summary table. Empty: it is not in there."""
    chart: str = ""
    """The chart that it is drawn in. Empty: none of its own (TensorBoard shows every tag on its page SCALARS)."""
    over_run: OverRun = "seconds"

    @property
    def pattern(self) -> str:
        """A regular expression that matches the names of this tag on every machine."""
        pattern = self.name.replace("<n>", r"\d+").replace("<metric>", r"\w+")
        is_of_machine = self.name.startswith(("gpu", "host/"))
        return rf"(machine\d+/)?{pattern}" if is_of_machine else pattern

    def names(self, logged: Iterable[str]) -> list[str]:
        """The logged names that belong to this tag."""
        return [name for name in logged if find_tag(name) is self]

    def title_of(self, name: str) -> str:
        """The title of one name: `SM activity, gpu0`; `CPU, user, machine1`; `validation top1_pct`."""
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
    Tag("data/feed_ratio", "x the speed without a feed", title="feed ratio"),
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
    Tag("gpu<n>/power_w", "W", title="GPU power", chart=POWER),
    Tag("gpu<n>/energy_j_per_1000_rows", "J for 1,000 trained rows", title="GPU energy", over_run="trained_rows"),
    Tag("gpu<n>/temperature_c", "°C"),
    Tag("gpu<n>/clock_limited_pct", "% of the time", title="GPU clocks held down", chart=CLOCKS),
    Tag("gpu<n>/pcie_rx_mb_per_s", "MB/s"),
    Tag("gpu<n>/pcie_width", "lanes", over_run="minimum"),
    Tag("host/cpu_user_pct", "% of all CPUs", title="CPU, user", chart=CPU),
    Tag("host/cpu_system_pct", "% of all CPUs", title="CPU, system", chart=CPU),
    Tag("host/cpu_iowait_pct", "% of all CPUs", title="CPU, waiting for disks", chart=CPU),
    Tag("host/rss_gib", "GiB", title="memory of the first process"),
    Tag("host/pss_gib", "GiB"),
    Tag("host/available_gib", "GiB"),
    Tag("host/disk_read_mb_per_s", "MB/s", title="disk reads", chart=DISK),
    Tag("host/page_cache_refaults_per_s", "pages/s", chart=PAGE_CACHE),
)

EXPLANATIONS = {
    "data/wait_pct": (
        "time in which the device was ready and the next pool was not; the maximum over all ranks",
        "that the step itself is fast",
    ),
    "data/fresh_rows_per_s": ("rows read, over all ranks", "how many steps that gives: rows may be echoed"),
    "train/trained_rows_per_s": ("rows trained on, over all ranks: fresh rows x echo", "how much new data was seen"),
    "data/feed_ratio": (
        "trained rows per second / those of the step alone, if `diagnose.py` has measured it",
        "why it is low; above 1 is noise, or the machine was busier when it was diagnosed",
    ),
    "train/step_ms": ("time from one optimizer step to the next", "how long the step alone takes"),
    "data/echo": (
        "trained rows / fresh rows; with `data.echo: auto`, what was free in the epoch before",
        "that more would cost no time",
    ),
    "train/loss": ("mean over the steps since the last point and over all ranks", ""),
    "train/lr": ("learning rate of the last step", ""),
    "val/loss": ("loss on the validation rows, if it is a metric of the workload", ""),
    "val/<metric>": ("metric of the workload; each validation row counts once for any number of ranks", ""),
    "gpu<n>/util_pct": (
        "time in which some kernel ran; mean of the driver's samples, several a second",
        "that the GPU was busy: one kernel on one of its SMs counts as 100 %",
    ),
    "gpu<n>/util_min_pct": ("the smallest of these samples", "how long it lasted"),
    "gpu<n>/sm_active_pct": ("SMs (multiprocessors) that were busy; needs Hopper or newer", "how well they were used"),
    "gpu<n>/tensor_active_pct": ("time in which tensor cores worked; needs Hopper or newer", "how well they were used"),
    "gpu<n>/mem_used_gib": ("memory in use as the driver counts it", "by which process"),
    "gpu<n>/mem_peak_gib": (
        "maximum so far of the memory that tensors of the first process took",
        "what the CUDA context and the caching allocator take besides",
    ),
    "gpu<n>/power_w": ("power of the card", "what the rest of the machine takes"),
    "gpu<n>/energy_j_per_1000_rows": ("power of the card / trained rows per second x 1000", "the rest of the machine"),
    "gpu<n>/temperature_c": ("temperature of the chip", ""),
    "gpu<n>/clock_limited_pct": ("samples at which power, heat or the board held the clocks down", "how far down"),
    "gpu<n>/pcie_rx_mb_per_s": ("bytes received in the 20 ms before each sample", "the mean: copies come in bursts"),
    "gpu<n>/pcie_width": ("PCIe lanes in use", ""),
    "host/cpu_user_pct": ("CPU time of all programs of the machine", "which process takes it"),
    "host/cpu_system_pct": ("CPU time of the kernel", "for which process"),
    "host/cpu_iowait_pct": ("idle time of CPUs while a disk was asked (Linux)", "which process waits for it"),
    "host/rss_gib": ("memory of the first process; pages shared with other processes count in full", ""),
    "host/pss_gib": ("the same; a page shared by n processes counts as 1/n (Linux)", ""),
    "host/available_gib": ("memory of the machine that programs can still have", "the limit of a container"),
    "host/disk_read_mb_per_s": ("bytes read from all disks of the machine", "by which process"),
    "host/page_cache_refaults_per_s": (
        "pages of files that were dropped and had to be read again (Linux)",
        "of which file",
    ),
}
"""{tag: (what it is, what it does not say)}, for docs/measuring.md of the template"""


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


def markdown_table() -> str:
    """The table of docs/measuring.md of the template."""
    lines = ["| tag | unit | meaning | what it does not say |", "|---|---|---|---|"]
    for tag in TAGS:
        meaning, caveat = EXPLANATIONS[tag.name]
        lines.append(f"| `{tag.name}` | {tag.unit} | {meaning} | {caveat} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(markdown_table())
