"""Rows of a file in a bucket: the first epoch, which fetches it, and the second, beside the same file on a local disk.

The bucket is nginx on this machine, which waits 0, 30 or 100 ms before each answer. It needs root and the Debian
packages nginx-light and libnginx-mod-http-echo; with rclone and fuse3, the bucket is also mounted as a folder. No TLS.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from functools import partial
from itertools import chain
from pathlib import Path

import h5py
import numpy as np
import ours
import publish
from publish import FailedError, Table, spread, take_turns

from fastgpu.feed.readers import NETWORK_READERS
from fastgpu.storage.store import open_store

SHAPE, BLOCK_ROWS = (3, 64, 64), 170
DELAYS_MS = (0, 30, 100)
PORT = 9400
LOCAL, MOUNTED = "local file, 2 readers", "mounted, 30 ms, 32 readers"
NGINX = """
load_module /usr/lib/nginx/modules/ngx_http_echo_module.so;
user root; worker_processes 1; daemon off; pid {folder}/pid; error_log {folder}/error;
events {{ worker_connections 1024; }}
http {{ access_log off; sendfile on; tcp_nodelay on; keepalive_requests 1000000; autoindex on;
client_body_temp_path {folder}; proxy_temp_path {folder}; fastcgi_temp_path {folder}; uwsgi_temp_path {folder};
scgi_temp_path {folder};
{servers}
}}
"""
SERVER = (
    "server {{ listen 127.0.0.1:{port}; root {folder}/store; location / {{ {wait} echo_exec @file; }} "
    "location @file {{ root {folder}/store; autoindex on; }} }}"
)


def write_file(path: Path, n_rows: int) -> None:
    rng = np.random.default_rng(0)
    path.parent.mkdir(parents=True)
    with h5py.File(path, "w") as file:
        images = file.create_dataset("images", (n_rows, *SHAPE), "u1", chunks=(BLOCK_ROWS, *SHAPE))
        for start in range(0, n_rows, BLOCK_ROWS):
            images[start : start + BLOCK_ROWS] = rng.integers(0, 256, (min(BLOCK_ROWS, n_rows - start), *SHAPE), "u1")
        file["labels"] = np.arange(n_rows) % 10
    subprocess.run(["sync"], check=True)  # so that it can leave the page cache


def start_nginx(folder: Path) -> subprocess.Popen:
    waits = (f"echo_sleep {delay / 1000};" if delay else "" for delay in DELAYS_MS)
    servers = (
        SERVER.format(port=PORT + delay, folder=folder, wait=wait) for delay, wait in zip(DELAYS_MS, waits, strict=True)
    )
    (folder / "nginx.conf").write_text(NGINX.format(folder=folder, servers="\n".join(servers)))
    process = subprocess.Popen(["nginx", "-c", f"{folder}/nginx.conf"], stderr=subprocess.DEVNULL)
    time.sleep(1)
    return process


def measure_here(path: str, n_readers: int, cache: str, n_later: int) -> None:
    """Print [samples/s, CPU us per sample, sum of what came] of the first epoch, and of the later ones together."""
    rows = open_store("FILE", path, {"images": "images", "labels": "labels"}, cache=cache)
    # `auto` is 64 for a URL until all rows are local; a number that is asked for stays.
    asked = "auto" if n_readers == NETWORK_READERS else n_readers
    feed = ours.open_feed(rows, 256, n_readers=asked, pool_batches=20)
    said = []
    n_first = 0  # requests of the first epoch
    for epochs in ([0], range(1, 1 + n_later)):
        t0, cpu_t0, n_rows, total = time.perf_counter(), time.process_time(), 0, 0
        for batch in chain.from_iterable(map(feed.batches, epochs)):
            n_rows += len(batch)
            total += int(batch["images"][:, 0, 0, 0].sum()) + int(batch["labels"].sum())
        if not n_rows:
            break
        if said and rows.n_requests > 1.1 * n_first:
            raise SystemExit("failed: later epochs fetched blocks again; is a tenth of the disk free?")
        n_first = rows.n_requests
        said.append([n_rows / (time.perf_counter() - t0), (time.process_time() - cpu_t0) / n_rows * 1e6, total])
    feed.close()
    print(json.dumps(said))


def measure(path: str, n_readers: int, n_later: int = 8) -> list[list[float]]:
    """The same in a process of its own, with nothing of the file in the page cache and an empty data.cache."""
    if Path(path).exists():
        file = os.open(path, os.O_RDONLY)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)
    with tempfile.TemporaryDirectory() as cache:
        command = [sys.executable, __file__, "--measure", path, str(n_readers), cache, str(n_later)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise FailedError(done.stderr.strip().splitlines()[-1])
    return json.loads(done.stdout.splitlines()[-1])


def measure_mounted(folder: Path, n_readers: int) -> list[list[float]]:
    """The first epoch from the bucket as rclone mounts it."""
    if not shutil.which("rclone"):
        raise FailedError("rclone is not installed")
    mount = folder / "mount"
    mount.mkdir(exist_ok=True)
    options = ["--http-url", f"http://127.0.0.1:{PORT + 30}", "--read-only", "--vfs-cache-mode", "off"]
    with subprocess.Popen(["rclone", "mount", ":http:bucket", mount, *options], stderr=subprocess.DEVNULL) as process:
        time.sleep(3)
        try:
            return measure(f"{mount}/x.h5", n_readers, n_later=0)
        finally:
            subprocess.run(["umount", mount], check=False)
            process.wait()


def main() -> None:
    args = publish.parser(__doc__).parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        file = folder / "store" / "bucket" / "x.h5"
        write_file(file, 3_000 if args.quick else 48_000)
        nginx = start_nginx(folder)
        ways = {LOCAL: partial(measure, str(file), 2)}
        for delay, n_readers in ((0, 8), (0, 64), (30, 8), (30, 32), (30, 64), (100, 64)):
            url = f"http://127.0.0.1:{PORT + delay}/bucket/x.h5"
            ways[f"URL, {delay} ms, {n_readers} readers"] = partial(measure, url, n_readers)
        ways[MOUNTED] = partial(measure_mounted, folder, 32)
        results = take_turns("bucket", ways, args.rounds)
        nginx.terminate()
    measured = {way: rounds for way, rounds in results.items() if not isinstance(rounds, str)}
    assert len({epochs[0][2] for rounds in measured.values() for epochs in rounds}) == 1, "the rows differ"
    rows = []
    for way, rounds in results.items():
        if isinstance(rounds, str):
            rows.append([way, rounds, "", "", ""])
            continue
        row = [way]
        for epoch in (0, 1):
            of_epoch = [epochs[epoch] for epochs in rounds if len(epochs) > epoch]
            row += [spread([each[column] for each in of_epoch], form) for column, form in ((0, ",.0f"), (1, ".0f"))]
        rows.append(row)
    ratios = []
    for epoch, way, least in ((0, "URL, 30 ms, 64 readers", 0.25), (1, "URL, 30 ms, 64 readers", 0.95)):
        pairs = zip(results[way], results[LOCAL], strict=True)
        ratio = [url[epoch][0] / local[epoch][0] for url, local in pairs]
        ratios.append(
            [f"{'later epochs' if epoch else 'first epoch'}: {way} / {LOCAL}", spread(ratio, ".2f"), f"{least}"]
        )
    note = (
        f"Samples of {np.prod(SHAPE) / 1000:.0f} kB in blocks of {BLOCK_ROWS}; the first "
        "epoch finds nothing of the file in the page cache or in data.cache. A real bucket was not measured, nor TLS."
    )
    columns = ["way", "epoch 1, samples/s", "CPU us per sample", "epochs 2 to 9, samples/s", "CPU us per sample"]
    tables = [Table("samples per second", columns, rows, note), Table("targets", publish.TARGET_COLUMNS, ratios)]
    publish.write_result("bucket", tables, results, args)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        path, n_readers, cache, n_later = sys.argv[2:]
        measure_here(path, int(n_readers), cache, int(n_later))
    else:
        main()
