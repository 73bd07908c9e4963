"""The cost of storing a turn: `python -m benchmarks.turn_commit --against DIR`. A table, then one line of JSON.

Turns of an engine that computes nothing, whose states are one of pulse-books', through the whole gateway without a
socket. `written`: bytes that reach the disk for a turn, by the kernel's count of the process that writes (this one for
SQLite, the server for Redis, whose append-only file is synced as named), snapshots included. `stop`: the same for what
follows once: the snapshot at the stop, and older ones that go later. `commit`: from the last token to the end of the
commit. `turns/s`: two gateways on one Redis, several sessions each, 16 tokens a turn. `in use`, `at rest`: the tenant's
bytes over one state, after the last turn and when nobody has used the session for a while. `snapshots`: of all turns,
and the one at the stop. `cold`: pulse-books, the first token of a turn on a gateway that never saw the session, after
`--context` tokens: right after a turn elsewhere (`ms`), with the state stored since (`stored_ms`), and of a turn that
reads as many tokens where the state is in memory (`read_ms`); with `--large-mb` also a state of that size and an engine
that computes nothing. `--against DIR` measures another checkout beside this one, in turns.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.state_packing import state_after
from benchmarks.turn_commit_worker import written_bytes
from nsm_core.config import EngineConfig
from nsm_core.model.loader import load_checkpoint
from nsm_lab.provenance import command_line, source_commit
from service.backends.local import LocalBackend

HERE = Path(__file__).resolve()
ROOT = HERE.parent.parent
WORKER = HERE.with_name("turn_commit_worker.py")
TOKENIZER = next((ROOT / "nsm_core" / "model" / "checkpoints").rglob("tokenizer.json"))
STATE_TOKENS = 4000
KINDS = ("sqlite FULL", "redis always", "redis everysec")


async def real_state() -> bytes:
    """Of pulse-books: zeros would take no room, now that snapshots are packed."""
    backend = LocalBackend(load_checkpoint(Path("pulse-books")), EngineConfig())
    await backend.start()
    try:
        return await state_after(backend, STATE_TOKENS)
    finally:
        await backend.stop()


def start(root: Path, *options: str) -> subprocess.Popen[str]:
    """A worker with the packages of `root`."""
    command = [sys.executable, str(WORKER), "--tokenizer", str(TOKENIZER), *options]
    environ = {**os.environ, "PYTHONPATH": str(root), "PYTHONSAFEPATH": "1"}
    return subprocess.Popen(command, cwd=root, env=environ, stdout=subprocess.PIPE, text=True)


def result(worker: subprocess.Popen[str]) -> dict[str, Any]:
    output, _ = worker.communicate()
    if worker.returncode:
        raise RuntimeError(f"a worker ended with {worker.returncode}")
    found: dict[str, Any] = json.loads(output.splitlines()[-1])
    return found


@contextlib.contextmanager
def redis(directory: str, policy: str) -> Iterator[tuple[str, int]]:
    """URL and process id of a server with an append-only file."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = ["--port", str(port), "--dir", directory, "--save", "", "--appendonly", "yes", "--appendfsync", policy]
    server = subprocess.Popen(["redis-server", *options], stdout=subprocess.DEVNULL)
    try:
        for _ in range(100):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                break
            time.sleep(0.1)
        yield f"redis://127.0.0.1:{port}", server.pid
    finally:
        server.terminate()
        server.wait()


def one_session(root: Path, kind: str, args: argparse.Namespace) -> dict[str, Any]:
    """Turns of one session, one after the other."""
    num_turns = args.turns if root == ROOT else args.other_turns
    limit = () if args.snapshot_tokens is None else ("--snapshot-tokens", str(args.snapshot_tokens))
    options = ("--mode", "turns", "--turns", str(num_turns), "--state", str(args.state), *limit)
    with tempfile.TemporaryDirectory(dir=args.dir) as directory:
        if kind.startswith("redis"):
            with redis(directory, kind.split()[1]) as (url, process_id):
                before = written_bytes(process_id)
                found = result(start(root, *options, "--store", url, "--writer", str(process_id)))
                found["num_written"] -= before
                num_at_stop = written_bytes(process_id) - before - found["num_written"]
        else:
            worker = start(root, *options, "--store", f"sqlite:///{directory}/sessions.db")
            num_all = 0
            while worker.poll() is None:
                with contextlib.suppress(OSError, StopIteration):
                    num_all = written_bytes(worker.pid)
                time.sleep(0.02)
            found = result(worker)
            num_at_stop = max(0, num_all - found["num_written"])
    commits = found["commit_ms"]
    return {
        "written_kb": round(found["num_written"] / num_turns / 1000, 1),
        "stop_kb": round(num_at_stop / num_turns / 1000, 1),
        "cpu_ms": round(1000 * found["cpu_s"] / num_turns, 2),
        "commit_p50_ms": round(commits[len(commits) // 2], 2),
        "commit_p99_ms": round(commits[int(0.99 * (len(commits) - 1))], 2),
        "in_use": round(found["bytes_in_use"] / args.state.stat().st_size, 2),
        "at_rest": round(found["bytes_at_rest"] / args.state.stat().st_size, 2),
        "snapshots": found["snapshots"],
    }


def two_gateways(root: Path, args: argparse.Namespace) -> float:
    """Turns of 16 tokens a second."""
    options = (
        "--mode",
        "turns",
        "--turns",
        str(args.short_turns),
        "--sessions",
        "8",
        "--tokens",
        "16",
        "--state",
        str(args.state),
    )
    with tempfile.TemporaryDirectory(dir=args.dir) as directory, redis(directory, "everysec") as (url, _):
        workers = [start(root, *options, "--store", url, "--name", name) for name in ("a", "b")]
        found = [result(worker) for worker in workers]
    return round(sum(one["num_turns"] / one["wall_s"] for one in found), 1)


def cold_turn(root: Path, args: argparse.Namespace) -> dict[str, Any]:
    options = ("--mode", "cold", "--turns", str(args.cold_turns), "--context", str(args.context))
    with tempfile.TemporaryDirectory(dir=args.dir) as directory:
        found = result(start(root, *options, "--store", f"sqlite:///{directory}/sessions.db"))
    return {name: [round(one, 1) for one in figures] for name, figures in found.items()}


def large_state(args: argparse.Namespace) -> dict[str, Any]:
    """Of this checkout alone, by store."""
    options = ("--mode", "large", "--turns", str(args.cold_turns), "--state-bytes", str(args.large_mb * 1_000_000))
    with tempfile.TemporaryDirectory(dir=args.dir) as directory:
        found = {"sqlite": result(start(ROOT, *options, "--store", f"sqlite:///{directory}/sessions.db"))}
        with redis(directory, "everysec") as (url, _):
            found["redis"] = result(start(ROOT, *options, "--store", url))
    return {
        name: {"stored_ms": round(one["stored_ms"]), "ms": [round(ms) for ms in one["ms"]]}
        for name, one in found.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, default=None, help="another checkout")
    parser.add_argument("--turns", type=int, default=1000)
    parser.add_argument("--other-turns", type=int, default=1000, help="of the other checkout")
    parser.add_argument("--snapshot-tokens", type=int, default=None, help="NSM_SNAPSHOT_TOKENS (default: the server's)")
    parser.add_argument("--short-turns", type=int, default=40, help="of each session of the two gateways")
    parser.add_argument("--cold-turns", type=int, default=5, help="0: none")
    parser.add_argument("--context", type=int, default=32_768)
    parser.add_argument("--large-mb", type=int, default=0, help="also a cold turn with a state of so many megabytes")
    parser.add_argument("--dir", type=Path, default=None, help="where the files are made (default: a temporary place)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.dir) as directory:
        args.state = Path(directory) / "state"
        args.state.write_bytes(asyncio.run(real_state()))
        measure(args)


def shown(figure: float | None) -> str:
    """Some figures earlier builds do not have."""
    return "-" if figure is None else str(figure)


def measure(args: argparse.Namespace) -> None:
    """Prints it all."""
    roots = {"this": ROOT, **({"other": args.against.resolve()} if args.against else {})}
    rows: dict[str, dict[str, Any]] = {name: {} for name in roots}
    for kind in KINDS:
        for name, root in roots.items():
            rows[name][kind] = one_session(root, kind, args)
    for name, root in roots.items():
        rows[name]["turns/s of 16 tokens, two gateways, redis everysec"] = two_gateways(root, args)
        if args.cold_turns:
            rows[name]["cold"] = cold_turn(root, args)
    if args.large_mb:
        rows["this"][f"cold, {args.large_mb} MB"] = large_state(args)
    print(f"$ {command_line()}")
    for kind in KINDS:
        for figure in rows["this"][kind]:
            print(
                f"{kind:<16}{figure:<16}" + "".join(f"{name:>8}{shown(rows[name][kind][figure]):>10}" for name in roots)
            )
    for name in roots:
        print(name, json.dumps({key: value for key, value in rows[name].items() if key not in KINDS}))
    fields = {
        "benchmark": "turn_commit",
        "commit": source_commit(),
        "turns": args.turns,
        "other_turns": args.other_turns,
        "rows": rows,
    }
    print(json.dumps(fields))


if __name__ == "__main__":
    main()
