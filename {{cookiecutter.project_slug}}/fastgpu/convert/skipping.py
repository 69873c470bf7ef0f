"""What `--on-error` does with a broken image or a broken line: stop, or leave it out and list it."""

from typing import Literal

from fastgpu.rows.contract import Source

OnError = Literal["stop", "skip"]
MAX_SKIPPED_SHARE = 0.01
"""If a larger share is broken, the data is not what it should be, and conversion stops."""


class SkippingSource(Source):
    """A source that may find out while it reads that a row is broken. Its fields have fixed shapes."""

    failed: dict[int, str]
    """{row: why it cannot be read}. `read` adds a broken row here and leaves its place undefined. Whoever takes rows
    from this source must leave out those that are listed here."""
