"""What no commit can do without: `python -m benchmarks.sync_floor`. A line of JSON.

Milliseconds of one synced write on the disk of `--dir`, of as many bytes as a turn adds to SQLite's write-ahead log:
behind the end of a file, as in the log's first 4 MiB, and over bytes that are there, as later. And of one SET of 1 KiB
over loopback, answered once the append-only file is synced (`always`) or before (`everysec`).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import redis

from benchmarks.turn_commit import redis as redis_server
from nsm_lab.provenance import command_line, source_commit

FRAME_BYTES = 1048  # of the log: a page of 1 KiB and its head
NUM_FRAMES = 6
PAUSE_S = 0.005  # between two writes, as turns have


def timed(write: Callable[[int], None], num_writes: int) -> dict[str, float]:
    """Percentiles in milliseconds; `write` gets the number of the write."""
    taken = []
    for number in range(num_writes):
        time.sleep(PAUSE_S)
        began = time.perf_counter()
        write(number)
        taken.append(1e3 * (time.perf_counter() - began))
    taken.sort()
    return {f"p{share}": round(taken[int(share / 100 * (num_writes - 1))], 2) for share in (10, 50, 99)}


def synced_writes(path: Path, num_writes: int, *, is_there: bool) -> dict[str, float]:
    """`is_there`: the file already has all bytes that are written."""
    frame = os.urandom(FRAME_BYTES)
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR)
    try:
        if is_there:
            os.pwrite(descriptor, bytes(num_writes * NUM_FRAMES * FRAME_BYTES), 0)
            os.fsync(descriptor)

        def write(number: int) -> None:
            for index in range(NUM_FRAMES):
                os.pwrite(descriptor, frame, (number * NUM_FRAMES + index) * FRAME_BYTES)
            os.fdatasync(descriptor)

        return timed(write, num_writes)
    finally:
        os.close(descriptor)


def set_values(directory: str, policy: str, num_writes: int) -> dict[str, float]:
    with redis_server(directory, policy) as (url, _), redis.Redis.from_url(url) as client:
        value = os.urandom(1024)
        return timed(lambda number: client.set("key", value), num_writes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--writes", type=int, default=400)
    parser.add_argument("--dir", type=Path, help="where the files are made (default: a temporary place)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.dir) as directory:
        found = {
            "append_ms": synced_writes(Path(directory) / "new", args.writes, is_there=False),
            "overwrite_ms": synced_writes(Path(directory) / "old", args.writes, is_there=True),
        }
        if shutil.which("redis-server"):
            for policy in ("always", "everysec"):
                found[f"redis_{policy}_ms"] = set_values(directory, policy, args.writes)
    about = {"command": command_line(), "commit": source_commit(), "load": round(os.getloadavg()[0], 1)}
    print(json.dumps({**about, **found}))


if __name__ == "__main__":
    main()
