"""One gateway or several on one machine: `python -m benchmarks.gateway_workers`. A table, then one line of JSON.

The gateways of `benchmarks.gateway_cost`, whose engines compute nothing, in turns one alone and several side by side on
one SQLite file: short turns of as many sessions in all. What a turn costs in CPU time, how many a second there are, and
how long the slowest tenth takes: whether processes that share the file stand in each other's way.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

from benchmarks.gateway_cost import HERE, Server, create_session, read_streams
from nsm_lab.provenance import command_line, source_commit


async def turns_of(server: Server, number: int, num_turns: int, num_tokens: int, taken: list[float]) -> None:
    """`number` clients, each with turns of sessions of its own."""

    async def client() -> None:
        for _ in range(num_turns):
            started = time.perf_counter()
            await read_streams(server, "sessions", 1, num_tokens)
            taken.append(time.perf_counter() - started)

    await asyncio.gather(*(client() for _ in range(number)))


async def load(servers: list[Server], args: argparse.Namespace) -> dict[str, float]:
    before, started = [server.clocks()["process_s"] for server in servers], time.perf_counter()
    taken: list[float] = []
    share = args.clients // len(servers)
    await asyncio.gather(*(turns_of(server, share, args.turns, args.tokens, taken) for server in servers))
    wall_s = time.perf_counter() - started
    spent = sum(server.clocks()["process_s"] - was for server, was in zip(servers, before, strict=True))
    return {
        "cpu_ms_per_turn": spent / len(taken) * 1e3,
        "turns_per_s": len(taken) / wall_s,
        "p90_ms": sorted(taken)[int(0.9 * len(taken))] * 1e3,
    }


def measure(num_workers: int, args: argparse.Namespace) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        store = f"sqlite:///{Path(directory) / 'sessions.db'}"
        servers = []
        for number in range(num_workers):
            servers.append(Server(str(number), HERE.parent.parent, args.step_ms, store=store))
            stack.callback(servers[-1].stop)
        asyncio.run(create_session(servers[0].port, "warm-up"))
        return asyncio.run(load(servers, args))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--clients", type=int, default=16, help="of all workers together")
    parser.add_argument("--turns", type=int, default=8, help="of each client")
    parser.add_argument("--tokens", type=int, default=16, help="of each turn")
    parser.add_argument("--step-ms", type=float, default=5.0)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    rows: dict[int, list[dict[str, float]]] = {number: [] for number in args.workers}
    for _ in range(args.repeats):
        for number in args.workers:
            rows[number].append(measure(number, args))
    print(f"{'workers':<8} {'CPU ms/turn':>12} {'turns/s':>8} {'p90 ms':>8}")
    for number, taken in rows.items():
        middle = [
            statistics.median(row[name] for row in taken) for name in ("cpu_ms_per_turn", "turns_per_s", "p90_ms")
        ]
        print(f"{number:<8} {middle[0]:>12.2f} {middle[1]:>8.1f} {middle[2]:>8.1f}")
    about = {"command": command_line(), "commit": source_commit(), "load": os.getloadavg()[0]}
    print(json.dumps({**about, "rows": rows}))


if __name__ == "__main__":
    main()
