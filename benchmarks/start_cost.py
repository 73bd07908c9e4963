"""CPU time and memory of a start of `nsm serve`: `python -m benchmarks.start_cost`. A table, then one line of JSON.

Each start is a process of its own with a new data directory, from its first instruction to the answer of `/health`;
with `--against DIR` another checkout's starts by turns. Python's compiled modules are in a cache of each checkout's
own, which a first start fills that is not counted, as an installation has them. CPU seconds are those of all threads.
Memory: at the first answer, at its peak until then, after `--idle` seconds without requests, at the end of `--load`
completions at once, and after `--idle` seconds more.
"""

from __future__ import annotations

import argparse
import concurrent.futures
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
LOAD_COLUMNS = ("loaded_mb", "after_load_mb")
COMPLETION = {"prompt": "The whale rose beside the boat, and the men " * 20, "max_tokens": 64, "ignore_eos": True}
COMPLETION_S = 300.0


def measure(
    build: Build, options: Sequence[str], compiled: Path, *, idle_s: float = 0.0, num_requests: int = 0
) -> dict[str, float]:
    """One start. `compiled`: the folder of Python's compiled modules. Raises NsmError when it fails."""
    port = free_port()
    with tempfile.TemporaryDirectory() as directory, (Path(directory) / "log").open("w+") as log:
        command = [str(build.python), "-c", RUN, "serve", "--host", HOST, "--port", str(port)]
        command += ["--data-dir", directory, *options]
        environ = {**os.environ, "PYTHONPATH": str(build.root), "PYTHONPYCACHEPREFIX": str(compiled / build.name)}
        environ.pop("PYTHONDONTWRITEBYTECODE", None)
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
            taken["idle_mb"] = use.rss_mb()
            if num_requests:
                complete(f"http://{HOST}:{port}/v1/completions", num_requests)
                taken["loaded_mb"] = use.rss_mb()
                time.sleep(idle_s)
                taken["after_load_mb"] = use.rss_mb()
            return taken
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


def complete(url: str, number: int) -> None:
    """So many completions at once, to their ends. Raises OSError for one that is refused."""
    body = json.dumps(COMPLETION).encode()
    headers = {"content-type": "application/json"}

    def one(_: int) -> None:
        with DIRECT.open(urllib.request.Request(url, body, headers), timeout=COMPLETION_S) as answer:
            answer.read()

    with concurrent.futures.ThreadPoolExecutor(number) as clients:
        list(clients.map(one, range(number)))


def peak_mb(pid: int) -> float:
    """The most memory that the process had so far, in MiB."""
    lines = Path(f"/proc/{pid}/status").read_text("utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) / 1024


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, help="another checkout, with its kernels built")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--idle", type=float, default=12.0, help="seconds; memory of the state pool goes back after 10")
    parser.add_argument("--load", type=int, default=0, help="completions at once after the idle time; 0: none")
    parser.add_argument("--serve", default="", help="options of nsm serve, as one argument")
    args = parser.parse_args(argv)
    builds = [Build(name="this", root=ROOT, python=Path(sys.executable))]
    if args.against is not None:
        builds.append(Build.at("against", args.against))
    taken: dict[str, list[dict[str, float]]] = {build.name: [] for build in builds}
    options, columns = shlex.split(args.serve), (*COLUMNS, *(LOAD_COLUMNS if args.load else ()))
    with tempfile.TemporaryDirectory() as directory:
        compiled = Path(directory)
        for build in builds:
            measure(build, options, compiled)
        for _ in range(args.rounds):
            for build in builds:
                found = measure(build, options, compiled, idle_s=args.idle, num_requests=args.load)
                taken[build.name].append(found)
    print(f"{'':<10}" + "".join(f"{name:>14}" for name in columns))
    for name, rows in taken.items():
        print(f"{name:<10}" + "".join(f"{statistics.median(row[key] for row in rows):>14.2f}" for key in columns))
    result = {**about_this_run(), "taken": taken}
    print(json.dumps(result))
    return result


if __name__ == "__main__":
    main()
