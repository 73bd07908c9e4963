"""Processes whose sessions' turns are stored in one SQLite file: `python -m benchmarks.turn_writers`. A line of JSON.

What workers do for turns, without HTTP and without an engine: `--sessions` of each process take a lease, write tokens
twice and commit, with `--pause-ms` between. Milliseconds that each call takes; of a turn, the milliseconds that its
process waited for the write lock (`lock`), those of CPU time while it had it (`held_cpu`), those of CPU time in all,
and its transactions. `--against DIR`: another checkout, in turns with this one.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
ROOT = HERE.parent.parent
CALLS = ("acquire", "append", "commit")
TOKENS = tuple(range(1000, 1064))
RESULT = bytes(900)  # what a turn of 64 tokens has


class Worker:
    """The sessions of one process."""

    def __init__(self, store: Any, pause_s: float) -> None:
        self.store, self.pause_s = store, pause_s
        self.taken: dict[str, list[float]] = {name: [] for name in CALLS}
        self.num_turns = 0

    async def timed(self, name: str, work: Awaitable[Any]) -> Any:
        began = time.monotonic()
        result = await work
        self.taken[name].append(time.monotonic() - began)
        return result

    async def pause(self) -> None:
        await asyncio.sleep(self.pause_s * random.uniform(0.5, 1.5))

    async def turns(self, name: str, end: float) -> None:
        from service.stores.sessions.base import KnownVersion, NewSession
        from service.stores.sessions.key import SessionKey

        key = SessionKey("tenant", name)
        head = await self.store.create(NewSession(key=key, model_fingerprint="m", metadata={}))
        await self.pause()
        while time.monotonic() < end:
            turn_id, known = f"{name}-{head.version}", KnownVersion(head.created_at, head.version)
            head = await self.turn(key, known, turn_id, head)
            self.num_turns += 1
            await self.pause()

    async def turn(self, key: Any, known: Any, turn_id: str, head: Any) -> Any:
        from service.stores.sessions.base import Commit
        from service.stores.sessions.turn_records import EndedTurn, TurnStart

        start = TurnStart(
            turn_id=turn_id,
            identity=turn_id,
            digest="d",
            base_version=head.version,
            model_fingerprint="m",
            request=bytes(300),
        )
        leased = await self.timed(
            "acquire",
            self.store.acquire(key, holder=turn_id, lease_s=10.0, known=known, start=start, max_records=16),
        )
        for index in range(2):
            await self.pause()
            append = self.store.append_turn(leased.lease, turn_id, index=index, chunk=bytes(128))
            await self.timed("append", append)
        commit = Commit(
            expected_version=head.version,
            snapshot=None,
            position=head.num_log_tokens + len(TOKENS) - 1,
            model_fingerprint="m",
            new_ids=TOKENS,
            num_sampled=len(TOKENS),
            seed=0,
            turn=EndedTurn(turn_id=turn_id, result=RESULT, ttl_s=3600.0),
        )
        return await self.timed("commit", self.store.commit(leased.lease, commit))


class LockClock:
    """Puts a clock around the wait for the write lock, and around the work that is done while this process has it."""

    def __init__(self) -> None:
        from service.stores.sqlite import connection as module

        self.wait_s, self.held_cpu_s, self.num_transactions = 0.0, 0.0, 0
        self._began_at = 0.0
        self._begin, self._committed = module._begin_writing, module._committed
        module._begin_writing, module._committed = self._timed_begin, self._timed

    def _timed_begin(self, *args: Any) -> None:
        began = time.monotonic()
        self._begin(*args)
        self.wait_s += time.monotonic() - began
        self._began_at = time.thread_time()

    @contextlib.contextmanager
    def _timed(self, connection: Any, **fields: Any) -> Iterator[None]:
        is_part = connection.in_transaction
        with self._committed(connection, **fields):
            yield
        if not is_part:
            self.held_cpu_s += time.thread_time() - self._began_at
            self.num_transactions += 1


async def work(path: Path, name: str, args: argparse.Namespace) -> dict[str, Any]:
    from service.stores.sessions.sqlite import SqliteSessionStore

    clock, store = LockClock(), SqliteSessionStore(path, busy_timeout_s=60.0)
    await store.open()
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    worker, cpu_s = Worker(store, args.pause_ms / 1e3), time.process_time()
    end = time.monotonic() + args.seconds
    await asyncio.gather(*(worker.turns(f"{name}-{number}", end) for number in range(args.sessions)))
    found = {
        "taken": worker.taken,
        "turns": worker.num_turns,
        "lock_s": clock.wait_s,
        "held_cpu_s": clock.held_cpu_s,
        "transactions": clock.num_transactions,
        "cpu_s": time.process_time() - cpu_s,
    }
    await store.close()
    return found


def run_all(root: Path, args: argparse.Namespace) -> dict[str, float]:
    """Of all processes of a checkout, together."""
    environ = {**os.environ, "PYTHONPATH": str(root), "PYTHONSAFEPATH": "1"}
    options = ["--sessions", str(args.sessions), "--pause-ms", str(args.pause_ms), "--seconds", str(args.seconds)]
    with tempfile.TemporaryDirectory(dir=args.dir) as directory:
        command = [sys.executable, str(HERE), *options, "--file", str(Path(directory) / "sessions.db"), "--name"]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        workers = [
            subprocess.Popen([*command, f"w{number}"], cwd=root, env=environ, **pipes)
            for number in range(args.processes)
        ]
        for worker in workers:
            if worker.stdout is None or not worker.stdout.readline():
                raise RuntimeError("a worker did not start")
        for worker in workers:
            if worker.stdin is not None:
                worker.stdin.close()
        found = [json.loads(worker.stdout.readline()) for worker in workers if worker.stdout is not None]
        for worker in workers:
            worker.wait()
    return summary(found, args.seconds)


def summary(found: list[dict[str, Any]], seconds: float) -> dict[str, float]:
    total: collections.Counter[str] = collections.Counter()
    for one in found:
        total.update({name: value for name, value in one.items() if name != "taken"})
    num_turns = total["turns"]
    row = {"turns_per_s": num_turns / seconds}
    for name in CALLS:
        taken = sorted(value for one in found for value in one["taken"][name])
        row |= {f"{name}_ms_p{share}": 1e3 * taken[int(share / 100 * (len(taken) - 1))] for share in (50, 95)}
    row |= {f"{name}_ms": 1e3 * total[f"{name}_s"] / num_turns for name in ("lock", "held_cpu", "cpu")}
    row["transactions"] = total["transactions"] / num_turns
    return {name: round(value, 2) for name, value in row.items()}


def main() -> None:
    from nsm_lab.provenance import command_line, source_commit

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--sessions", type=int, default=32, help="of each process")
    parser.add_argument("--pause-ms", type=float, default=75.0, help="between two calls, give or take a half")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--against", type=Path, help="another checkout")
    parser.add_argument("--dir", type=Path, help="where the file is made")
    parser.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--name", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.file is not None:
        print(json.dumps(asyncio.run(work(args.file, args.name, args))), flush=True)
        return
    roots = {"this": ROOT} if args.against is None else {"against": args.against.resolve(), "this": ROOT}
    print(json.dumps({"command": command_line(), "commit": source_commit(), "load": round(os.getloadavg()[0], 1)}))
    for _ in range(args.repeats):
        for name, root in roots.items():
            print(f"{name:<8}", json.dumps(run_all(root, args)), flush=True)


if __name__ == "__main__":
    main()
