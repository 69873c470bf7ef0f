"""`convert.py images` from Parquet files, tar shards and a zip file, beside the same JPEG files in a folder.

The Parquet files are as the library `datasets` writes them, a struct of bytes and path in row groups of 100 rows; the
tar shards are in WebDataset's form. Each way runs in this process, from opening the source to the file that is written.
"""

import contextlib
import os
import sys
import tarfile
import tempfile
import time
import zipfile
from functools import partial
from pathlib import Path

import polars as pl
import publish
import torch
from data import DataSpec, make_jpegs
from publish import spread, take_turns

from fastgpu.convert.command import parse

JPEGS = DataSpec("JPEG of 256 x 256", 10_000, (3, 256, 256), 256)
REQUIRED = 0.9
SHARD_ROWS = 1000
GROUP_ROWS = 100
FILES = "files in a folder"
IMAGE = pl.Struct({"bytes": pl.Binary, "path": pl.String})


def write_sources(folder: Path, target: Path) -> dict[str, str]:
    """{way: SOURCE of convert.py}. folder: <class>/*.jpg."""
    paths = sorted(folder.rglob("*.jpg"))
    with zipfile.ZipFile(target / "photos.zip", "w") as archive:
        for path in paths:
            archive.write(path, path.relative_to(folder))
    for number, start in enumerate(range(0, len(paths), SHARD_ROWS)):
        shard = paths[start : start + SHARD_ROWS]
        images = [{"bytes": path.read_bytes(), "path": path.name} for path in shard]
        labels = [path.parent.name for path in shard]
        table = pl.DataFrame({"image": pl.Series(images, dtype=IMAGE), "label": labels})
        table.write_parquet(target / f"part-{number:03d}.parquet", row_group_size=GROUP_ROWS)
        with tarfile.open(target / f"shard-{number:03d}.tar", "w") as archive:
            for path in shard:
                archive.add(path, path.name)
                label = target / f"{path.stem}.cls"
                label.write_text(path.parent.name)
                archive.add(label, label.name)
                label.unlink()
    sources = {"Parquet": "part-*.parquet", "tar": "shard-*.tar", "zip": "photos.zip"}
    return {FILES: str(folder)} | {way: str(target / name) for way, name in sources.items()}


def convert(source: str, target: Path, *flags: str) -> tuple[float, float]:
    """(seconds, CPU seconds) of one conversion."""
    command = parse(["images", source, str(target), "--force", *flags])
    t0, cpu_t0 = time.perf_counter(), time.process_time()
    with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stdout(nowhere):
        command.run()
    return time.perf_counter() - t0, time.process_time() - cpu_t0


def main() -> None:
    args = publish.parser(__doc__).parse_args()
    torch.set_num_threads(1)  # as convert.py does
    jpegs = JPEGS.small() if args.quick else JPEGS
    make_jpegs(jpegs)
    tables, data = [], {}
    with tempfile.TemporaryDirectory(dir=jpegs.folder) as name:
        sources = write_sources(jpegs.folder / "source", Path(name))
        for title, flags in {"pixels": [], "encoded": ["--keep-encoded"]}.items():
            ways = {way: partial(convert, source, Path(name, "x.h5"), *flags) for way, source in sources.items()}
            # The first round, which warms the page cache, does not count.
            data[title] = {way: times[1:] for way, times in take_turns(title, ways, args.rounds + 1).items()}
            rows = []
            for way, times in data[title].items():
                speeds = [jpegs.n_rows / seconds for seconds, _ in times]
                pairs = list(zip(data[title][FILES], times, strict=True))
                ratios = [spread([files[clock] / own[clock] for files, own in pairs], ".2f") for clock in (0, 1)]
                rows.append([way, spread(speeds, ",.0f"), *ratios, f">= {REQUIRED}" if way != FILES else ""])
            columns = ["source", "images/s", "speed beside files", "the same in CPU time", "required"]
            tables.append(publish.Table(f"convert.py images, {title}", columns, rows, f"{jpegs.n_rows:,} images."))
    publish.write_result("sources", tables, data, args)


if __name__ == "__main__":
    sys.exit(main())
