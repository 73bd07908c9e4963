"""CPU time and memory of a start of `nsm serve`: `python -m benchmarks.start_cost`. A table, then one line of JSON.

Each start is a process of its own with a new data directory, from its first instruction to the answer of `/health`;
with `--against DIR` another checkout's starts by turns. CPU seconds are those of all threads. Memory: at the first
answer, at its peak until then, and after `--idle` seconds without requests.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.about import about_this_run
from benchmarks.peers.servers import DIRECT, HOST, START_S, STOP_S, free_port
from nsm_core.errors import NsmError
from nsm_lab.bench.builds import RUN, Build
from nsm_lab.bench.machine import ProcessUse

ROOT = Path(__file__).parents[1]
POLL_S = 0.01
COLUMNS = ("cpu_s", "wall_s", "started_mb", "peak_mb", "idle_mb")


def measure(build: Build, options: Sequence[str], *, idle_s: float) -> dict[str, float]:
    """One start. Raises NsmError when it fails."""
    port = free_port()
    with tempfile.TemporaryDirectory() as directory, (Path(directory) / "log").open("w+") as log:
        command = [str(build.python), "-c", RUN, "serve", "--host", HOST, "--port", str(port)]
        command += ["--data-dir", directory, *options]
        environ = {**os.environ, "PYTHONPATH": str(build.root)}
        began = time.monotonic()
        process = subprocess.Popen(command, cwd=directory, env=environ, stdout=log, stderr=log)
        try:
            wait_for(f"http://{HOST}:{port}/health", process)
            wall_s, use = time.monotonic() - began, ProcessUse(process.pid)
            taken = {
                "cpu_s": use.cpu_s(),
                "wall_s": wall_s,
                "started_mb": use.rss_mb(),
                "peak_mb": peak_mb(process.pid),
            }
            time.sleep(idle_s)
            return {**taken, "idle_mb": use.rss_mb()}
        except NsmError as error:
            log.seek(0)
            raise NsmError(f"{build.name}: {error}: {log.read()[-2000:]}") from error
        finally:
            process.terminate()
            process.wait(STOP_S)


def wait_for(url: str, process: subprocess.Popen[Any]) -> None:
    """Returns at the first answer. Raises NsmError."""
    until = time.monotonic() + START_S
    while time.monotonic() < until and process.poll() is None:
        with contextlib.suppress(urllib.error.URLError, OSError), DIRECT.open(url, timeout=5):
            return
        time.sleep(POLL_S)
    raise NsmError("the server did not start")


def peak_mb(pid: int) -> float:
    """The most memory that the process had so far, in MiB."""
    lines = Path(f"/proc/{pid}/status").read_text("utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) / 1024


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, help="another checkout, with its kernels built")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--idle", type=float, default=12.0, help="seconds; memory of the state pool goes back after 10")
    parser.add_argument("--serve", default="", help="options of nsm serve, as one argument")
    args = parser.parse_args(argv)
    builds = [Build(name="this", root=ROOT, python=Path(sys.executable))]
    if args.against is not None:
        builds.append(Build.at("against", args.against))
    taken: dict[str, list[dict[str, float]]] = {build.name: [] for build in builds}
    for _ in range(args.rounds):
        for build in builds:
            taken[build.name].append(measure(build, shlex.split(args.serve), idle_s=args.idle))
    print(f"{'':<10}" + "".join(f"{name:>12}" for name in COLUMNS))
    for name, rows in taken.items():
        print(f"{name:<10}" + "".join(f"{statistics.median(row[key] for row in rows):>12.2f}" for key in COLUMNS))
    result = {**about_this_run(), "taken": taken}
    print(json.dumps(result))
    return result


if __name__ == "__main__":
    main()
