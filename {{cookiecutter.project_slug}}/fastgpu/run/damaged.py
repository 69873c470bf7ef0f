"""Rows that could not be decoded on any rank: the first are printed, and all are listed in the folder of the run."""

from collections.abc import Sequence
from pathlib import Path

from fastgpu.process.atomic import write_own
from fastgpu.process.launch import UserError, warn
from fastgpu.process.world import World
from fastgpu.rows.contract import Source

LIST = "damaged-rows.txt"
"""File in the folder of a run with a line for each row. A resumed run adds to it."""
MAX_PRINTED = 5
"""Rows that are printed one by one."""
EFFECTS = {"data.train": "the next row is trained on in its place", "data.val": "it is left out of the metrics"}


class DamagedRows:
    """The damaged rows of data.train and data.val, if they do not end the run. Every rank has an instance."""

    def __init__(self, sources: Sequence[Source], world: World):
        """sources: of training and validation."""
        named = zip(EFFECTS, sources, strict=True)
        self._sources = {key: source for key, source in named if source.damaged is not None}
        self._world = world
        self._lines: dict[str, None] = {}
        self.summary = ""
        """How many rows are damaged, in one line. Empty: none was found."""

    def tell(self, folder: Path | None = None) -> None:
        """Print and list the rows that any rank has found since the last call. Every rank calls this together.

        folder: of the run, for the list. Raises UserError on every rank if more than 1 % of the rows are damaged.
        """
        if not self._sources:
            return
        own = [
            f"{key}: {text}; {EFFECTS[key]}"
            for key, source in self._sources.items()
            for _, text in sorted((source.damaged or {}).copy().items())  # readers add to it
        ]
        n_told = len(self._lines)
        new = [line for line in own if line not in self._lines]
        for rank, n_new in enumerate(self._world.all_gather(float(len(new)))):
            if n_new:
                self._lines |= dict.fromkeys(self._world.broadcast(new, source=rank))
        if len(self._lines) == n_told:
            return
        place = f"; {folder / LIST} lists them" if folder else ""
        self.summary = f"damaged rows so far: {len(self._lines):,}{place}"
        if self._world.is_main:
            if folder:
                _add_lines(folder / LIST, self._lines)
            for text in [*[*self._lines][n_told:MAX_PRINTED], self.summary]:
                warn(text)
        if len(self._lines) > sum(source.max_damaged for source in self._sources.values()):
            raise UserError(f"more than 1 % of the rows are damaged ({len(self._lines):,}){place}")


def _add_lines(path: Path, lines: dict[str, None]) -> None:
    """Write a file with its lines, and new ones behind them."""
    try:
        old = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        write_own(path, "".join(f"{line}\n" for line in dict.fromkeys([*old, *lines])))
    except OSError as error:
        warn(f"cannot write {path} ({error}); training goes on")
