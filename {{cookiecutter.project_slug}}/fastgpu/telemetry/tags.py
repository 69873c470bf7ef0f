"""Every scalar that a run logs: one table for TensorBoard's charts, the summary, report.html and docs/measuring.md.

A tag is `group/name_unit`. A job on several machines logs the tags of `gpu<n>` and `host` once for each machine, those
of the second one as `machine1/host/...`. `python -m fastgpu.telemetry.tags` prints the table of that page.
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


class Tag(NamedTuple):
    """One scalar, or one for each GPU (`<n>`) or metric (`<metric>`)."""

    name: str
    unit: str
    meaning: str
    caveat: str = ""
    """What the number does not say."""
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


TAGS = (
    Tag(
        "data/wait_pct",
        "% of the time",
        "share of the time in which the device had finished its work and the next pool had not arrived; the maximum "
        "over all ranks (CUDA events on the stream of the loop; plain clocks on a CPU)",
        "that the step itself is fast",
        title="data wait",
        chart=FED,
    ),
    Tag(
        "data/fresh_rows_per_s",
        "rows/s",
        "rows read, over all ranks",
        "how many steps that gives: rows may be echoed",
        title="fresh rows",
        chart=RATES,
    ),
    Tag(
        "train/trained_rows_per_s",
        "rows/s",
        "rows trained on, over all ranks: fresh rows x `data/echo`",
        "how much new data was seen",
        title="trained rows",
        chart=RATES,
    ),
    Tag(
        "data/feed_ratio",
        "x the speed without a feed",
        "trained rows per second / those of the same step on a batch that stays on the device. It is there if "
        "`diagnose.py` has measured this model, batch size and machine before (`diagnosis.json` in `run.folder`)",
        "why it is low; above 1 it is noise, or the machine was busier when it was diagnosed",
        title="feed ratio",
    ),
    Tag(
        "train/step_ms",
        "ms, data wait included",
        "time from one optimizer step to the next",
        "how long the step alone takes: `diagnose.py` measures that",
        title="step",
        over_run="steps",
    ),
    Tag(
        "data/echo",
        "times",
        "trained rows / fresh rows",
        "that more would cost no time; with `data.echo: auto` it is what was free in the epoch before",
        over_run="fresh_rows",
    ),
    Tag("train/loss", "", "mean over the steps since the last point and over all ranks", chart=LOSS, over_run="last"),
    Tag("train/lr", "", "learning rate of the last step", over_run="last"),
    Tag(
        "val/loss",
        "",
        "loss on the validation rows, if it is a metric of the workload",
        title="validation loss",
        chart=LOSS,
        over_run="last",
    ),
    Tag(
        "val/<metric>",
        "",
        "metric of the workload over all validation rows; each row counts once for any number of ranks",
        title="validation",
        over_run="last",
    ),
    Tag(
        "gpu<n>/util_pct",
        "% of the time",
        "GPU-Util: share of the time in which some kernel ran; mean of the driver's samples, several a second",
        "that the GPU was busy: one kernel on one of its SMs counts as 100 %",
        title="GPU-Util",
        chart=FED,
    ),
    Tag(
        "gpu<n>/util_min_pct",
        "% of the time",
        "the smallest of these samples",
        "how long it lasted",
        title="GPU-Util, minimum",
        chart=FED,
        over_run="minimum",
    ),
    Tag(
        "gpu<n>/sm_active_pct",
        "% of the SMs",
        "share of the SMs (multiprocessors) that were busy; needs Hopper or newer",
        "how well they were used",
        title="SM activity",
        chart=FED,
    ),
    Tag(
        "gpu<n>/tensor_active_pct",
        "% of the time",
        "share of the time in which the tensor cores worked; needs Hopper or newer",
        "how well they were used",
        title="tensor cores",
    ),
    Tag("gpu<n>/mem_used_gib", "GiB", "memory in use as the driver counts it", "by which process"),
    Tag(
        "gpu<n>/mem_peak_gib",
        "GiB",
        "maximum so far of the memory that tensors of the first process took",
        "what the CUDA context and the caching allocator take besides",
        title="GPU memory, peak of tensors",
        over_run="maximum",
    ),
    Tag(
        "gpu<n>/power_w", "W", "power of the card", "what the rest of the machine takes", title="GPU power", chart=POWER
    ),
    Tag(
        "gpu<n>/energy_j_per_1000_rows",
        "J for 1,000 trained rows",
        "power of the card / trained rows per second of the job x 1000",
        "what the rest of the machine takes",
        title="GPU energy",
        over_run="trained_rows",
    ),
    Tag("gpu<n>/temperature_c", "°C", "temperature of the chip"),
    Tag(
        "gpu<n>/clock_limited_pct",
        "% of the time",
        "share of the samples at which power, heat or the board held the clocks down",
        "how far down",
        title="GPU clocks held down",
        chart=CLOCKS,
    ),
    Tag(
        "gpu<n>/pcie_rx_mb_per_s",
        "MB/s",
        "bytes that the card received in the 20 ms before each sample",
        "the mean: copies come in bursts",
    ),
    Tag("gpu<n>/pcie_width", "lanes", "PCIe lanes in use", over_run="minimum"),
    Tag(
        "host/cpu_user_pct",
        "% of all CPUs",
        "CPU time of all programs of the machine",
        "which process takes it",
        title="CPU, user",
        chart=CPU,
    ),
    Tag(
        "host/cpu_system_pct",
        "% of all CPUs",
        "CPU time of the kernel",
        "for which process",
        title="CPU, system",
        chart=CPU,
    ),
    Tag(
        "host/cpu_iowait_pct",
        "% of all CPUs",
        "idle time of CPUs while a disk was asked (Linux)",
        "which process waits for it",
        title="CPU, waiting for disks",
        chart=CPU,
    ),
    Tag(
        "host/rss_gib",
        "GiB",
        "memory of the first process; pages shared with other processes count in full",
        title="memory of the first process",
    ),
    Tag("host/pss_gib", "GiB", "the same; a page shared by n processes counts as 1/n (Linux)"),
    Tag("host/available_gib", "GiB", "memory of the machine that programs can still have", "the limit of a container"),
    Tag(
        "host/disk_read_mb_per_s",
        "MB/s",
        "read from all disks of the machine",
        "by which process",
        title="disk reads",
        chart=DISK,
    ),
    Tag(
        "host/page_cache_refaults_per_s",
        "pages/s",
        "pages of files that had been in the page cache, were dropped, and had to be read again (Linux)",
        "of which file",
        chart=PAGE_CACHE,
    ),
)


@cache
def find_tag(name: str) -> Tag | None:
    """The first tag of the table that a logged name belongs to."""
    return next((tag for tag in TAGS if re.fullmatch(tag.pattern, name)), None)


def charts() -> dict[str, list[Tag]]:
    """{title of a chart: its tags}, in the order of the table."""
    grouped: dict[str, list[Tag]] = {}
    for tag in TAGS:
        if tag.chart:
            grouped.setdefault(tag.chart, []).append(tag)
    return grouped


def markdown_table() -> str:
    """The table of docs/measuring.md."""
    lines = ["| tag | unit | meaning | what it does not say |", "|---|---|---|---|"]
    lines += [f"| `{tag.name}` | {tag.unit} | {tag.meaning} | {tag.caveat} |" for tag in TAGS]
    return "\n".join(lines)


if __name__ == "__main__":
    print(markdown_table())
