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
        """sources: of training and validation, or none."""
        named = zip(EFFECTS, sources, strict=False)
        self._sources = {key: source for key, source in named if source.damaged is not None}
        self._world = world
        self._n_shared = dict.fromkeys(self._sources, 0)
        self._rows: dict[str, set[int]] = {key: set() for key in self._sources}
        self._lines: list[str] = []
        self.summary = ""
        """How many rows are damaged, in one line. Empty: none was found."""

    def tell(self, folder: Path | None = None) -> None:
        """Print and list the rows that any rank has found since the last call. Every rank calls this together.

        folder: of the run, for the list. Raises UserError on every rank if more rows are damaged than may be.
        """
        lines = []
        for key, source in self._sources.items():
            found = list((source.damaged or {}).items())
            own = found[self._n_shared[key] :]
            self._n_shared[key] = len(found)
            for rank, n_found in enumerate(self._world.all_gather(float(len(own)))):
                texts = dict(self._world.broadcast(own, source=rank)) if n_found else {}
                new_rows = sorted(texts.keys() - self._rows[key])
                self._rows[key].update(new_rows)
                lines += [f"{key}: {texts[row]}; {EFFECTS[key]}" for row in new_rows]
        if lines and self._world.is_main:
            self._list(lines, folder)
        for key, source in self._sources.items():
            n_rows = len(self._rows[key])
            if n_rows > source.max_damaged:
                place = f"; {folder / LIST} lists them" if folder else ""
                raise UserError(f"{n_rows:,} of the {len(source):,} rows of {key} are damaged, more than 1 %{place}")

    def _list(self, lines: Sequence[str], folder: Path | None) -> None:
        """Print the first lines, and write all of them below those of the run before it was resumed."""
        place = ""
        if folder:
            path = folder / LIST
            place = f"; {path} lists them"
            try:
                if not self._lines and path.exists():
                    self._lines = path.read_text(encoding="utf-8").splitlines()
                write_own(path, "".join(f"{line}\n" for line in dict.fromkeys([*self._lines, *lines])))
            except OSError as error:
                warn(f"cannot write {path} ({error}); training goes on")
        new_lines = [line for line in lines if line not in set(self._lines)]
        for line in new_lines[: max(0, MAX_PRINTED - len(self._lines))]:
            warn(line)
        self._lines += new_lines
        self.summary = f"damaged rows so far: {len(self._lines):,}{place}"
        warn(self.summary)
