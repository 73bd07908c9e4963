"""Processes that write to one SQLite file: `python -m benchmarks.store_writers --processes 8`. A line of JSON.

Each has `--tasks` that make one short durable write after another, with `--pause-ms` between, as turns of sessions do
with workers. Writes a second of all, and milliseconds that a write takes. On the disk of `--dir`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sqlite3
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from nsm_lab.provenance import command_line, source_commit
from service.stores.sqlite.connection import transaction
from service.stores.sqlite.database import FileDatabase

ROW = "INSERT INTO usage (tenant, num_sessions, num_bytes) VALUES (?, 0, 0)"
NEXT = f"{ROW} ON CONFLICT (tenant) DO UPDATE SET num_bytes = num_bytes + 1"


async def write(path: Path, num_tasks: int, pause_s: float, seconds: float) -> list[float]:
    """The seconds that each write took."""
    database, taken = FileDatabase(path, max_bytes=None, busy_timeout_s=60.0), list[float]()
    await database.open()
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    end = time.monotonic() + seconds

    def work(connection: sqlite3.Connection, name: str) -> None:
        with transaction(connection):
            connection.execute(NEXT, (name,))

    async def task(name: str) -> None:
        while (began := time.monotonic()) < end:
            await database.write_short(lambda connection: work(connection, name), is_synced=True)
            taken.append(time.monotonic() - began)
            await asyncio.sleep(pause_s)

    await asyncio.gather(*(task(f"{os.getpid()}-{number}") for number in range(num_tasks)))
    await database.close()
    return taken


def run_all(args: argparse.Namespace, path: Path) -> list[float]:
    """The seconds that each write of each process took, in order."""
    command = [sys.executable, "-m", "benchmarks.store_writers", "--file", str(path), "--tasks", str(args.tasks)]
    command += ["--pause-ms", str(args.pause_ms), "--seconds", str(args.seconds)]
    writers = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(args.processes)
    ]
    taken: list[float] = []
    for writer in writers:
        if writer.stdout is None or not writer.stdout.readline():
            raise RuntimeError("a writer did not start")
    for writer in writers:
        if writer.stdin is not None:
            writer.stdin.close()
    for writer in writers:
        if writer.stdout is not None:
            taken += json.loads(writer.stdout.readline())
        writer.wait()
    return sorted(taken)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--tasks", type=int, default=32, help="of each process")
    parser.add_argument("--pause-ms", type=float, default=0.0)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--dir", type=Path, help="where the file is made")
    parser.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.file is not None:
        print(json.dumps(asyncio.run(write(args.file, args.tasks, args.pause_ms / 1e3, args.seconds))), flush=True)
        return
    with tempfile.TemporaryDirectory(dir=args.dir) as directory:
        taken = run_all(args, Path(directory) / "sessions.db")
    found = {f"ms_p{share:g}": round(1e3 * taken[int(share / 100 * (len(taken) - 1))], 1) for share in (50, 95, 100)}
    about = {"command": command_line(), "commit": source_commit(), "load": round(os.getloadavg()[0], 1)}
    print(json.dumps({**about, "writes_per_s": round(len(taken) / args.seconds), **found}))


if __name__ == "__main__":
    main()
