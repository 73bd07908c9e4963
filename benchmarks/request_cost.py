"""What the gateway costs per request: `python -m benchmarks.request_cost`. A table, then one line of JSON.

The server of `benchmarks.gateway_cost`: the real application on a real socket, with an engine that computes nothing.
Answers have one token, so nearly all of the cost is that of a request: HTTP, checks, tokens of the prompt, scheduling,
the ends of streams, metrics, logs. CPU microseconds of the server's processes for each request. `--clients` each have a
connection of their own and send one request after the other; with `--fresh` each request has a new connection.

`--against DIR` measures another checkout beside this one, in turns, in the same run.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks.gateway_cost import HERE, Server, create_session
from nsm_lab.provenance import command_line, source_commit

PROMPT = "It was the best of times, it was the worst of times, it was the age of wisdom. " * 2
STREAM = {"stream": True, "stream_options": {"include_usage": True}}
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "completions": ("/v1/completions", {"prompt": PROMPT, **STREAM}),
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": PROMPT}], **STREAM}),
    "turn": ("/v1/sessions/{}/generate", {"input": PROMPT, **STREAM}),
    "whole": ("/v1/completions", {"prompt": PROMPT}),
    "health": ("/health/live", {}),
}


class Answers(asyncio.Protocol):
    """One connection: a request, then its answer, then the next request."""

    def __init__(self) -> None:
        self._received = b""
        self._whole: asyncio.Future[bytes] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        if is_whole(self._received) and self._whole is not None:
            self._whole.set_result(self._received)
            self._received, self._whole = b"", None

    def connection_lost(self, error: Exception | None) -> None:
        if self._whole is not None:
            self._whole.set_exception(error or ConnectionError("the server closed the connection"))

    async def ask(self, request: bytes) -> bytes:
        self._whole = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return await self._whole

    def close(self) -> None:
        self._transport.close()


def is_whole(received: bytes) -> bool:
    """Whether an answer has come to its end."""
    head, _, body = received.partition(b"\r\n\r\n")
    if b"transfer-encoding: chunked" in head:
        return body.endswith(b"0\r\n\r\n")
    length = head.partition(b"content-length: ")[2].partition(b"\r\n")[0]
    return bool(length) and len(body) == int(length)


def request_of(kind: str, session_id: str, num_tokens: int) -> bytes:
    path, fields = BODIES[kind]
    target = path.format(session_id)
    if not fields:
        return f"GET {target} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode()
    raw = json.dumps({**fields, "max_tokens": num_tokens, "ignore_eos": True, "temperature": 0.8}).encode()
    lines = [f"POST {target} HTTP/1.1", "host: localhost", "content-type: application/json"]
    return "\r\n".join([*lines, f"content-length: {len(raw)}", "", ""]).encode() + raw


async def send_requests(server: Server, kind: str, args: argparse.Namespace) -> None:
    """All clients, to their end."""
    names = [f"s{time.monotonic_ns()}-{number}" for number in range(args.clients)]
    if kind == "turn":
        for name in names:
            await create_session(server.port, name)
    await asyncio.gather(*(client(server, request_of(kind, name, args.tokens), args) for name in names))


async def client(server: Server, request: bytes, args: argparse.Namespace) -> None:
    connect = asyncio.get_running_loop().create_connection
    _, connection = await connect(Answers, "127.0.0.1", server.port)
    for number in range(args.requests):
        if args.fresh and number:
            connection.close()
            _, connection = await connect(Answers, "127.0.0.1", server.port)
        answer = await connection.ask(request)
        if not answer.startswith(b"HTTP/1.1 200") or b'"error"' in answer:
            raise RuntimeError(f"a wrong answer: {answer[:600]!r}")
    connection.close()


def measure(server: Server, kind: str, args: argparse.Namespace) -> dict[str, float]:
    before, started = server.clocks(), time.perf_counter()
    asyncio.run(send_requests(server, kind, args))
    wall_s, after = time.perf_counter() - started, server.clocks()
    number = args.clients * args.requests
    process_s, loop_s = (after[name] - before[name] for name in ("process_s", "loop_s"))
    return {
        "cpu_us": process_s / number * 1e6,
        "loop_us": loop_s / number * 1e6,
        "other_us": (process_s - loop_s) / number * 1e6,
        "requests_per_s": number / wall_s,
    }


def compare(kind: str, servers: list[Server], args: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    """Rows of each server, measured in turns; the first of each is a warm-up."""
    rows: dict[str, list[dict[str, float]]] = {server.name: [] for server in servers}
    for turn in range(args.repeats + 1):
        for server in servers if turn % 2 else servers[::-1]:
            row = measure(server, kind, args)
            if turn:
                rows[server.name].append(row)
    for name, taken in rows.items():
        middle = {key: statistics.median(row[key] for row in taken) for key in taken[0]}
        costs = sorted(row["cpu_us"] for row in taken)
        print(
            f"{kind:<12} {name:<8} {middle['cpu_us']:>8.0f} {costs[0]:>7.0f}-{costs[-1]:<7.0f}"
            f"{middle['loop_us']:>8.0f} {middle['other_us']:>8.0f} {middle['requests_per_s']:>11.0f}"
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, help="another checkout, measured in turns with this one")
    parser.add_argument("--kinds", nargs="+", choices=list(BODIES), default=list(BODIES))
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--requests", type=int, default=20, help="of each client")
    parser.add_argument("--tokens", type=int, default=1, help="of each answer")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--step-ms", type=float, default=1.0, help="of the engine")
    parser.add_argument("--fresh", action="store_true", help="a new connection for each request")
    parser.add_argument("--split", action="store_true", help="the engine in a process of its own, as with workers")
    parser.add_argument("--store", choices=("memory", "sqlite"), default="memory", help="sqlite: a file of its own")
    args = parser.parse_args()
    print(f"{'':<21} {'cpu us':>8} {'range':^15}{'loop':>8} {'other':>8} {'requests/s':>11}")
    with contextlib.ExitStack() as stack:
        roots = {"this": HERE.parent.parent, **({"against": args.against.resolve()} if args.against else {})}
        servers = [
            Server(name, root, args.step_ms, store=args.store, is_split=args.split) for name, root in roots.items()
        ]
        for server in servers:
            stack.callback(server.stop)
        rows = {kind: compare(kind, servers, args) for kind in args.kinds}
    about = {"command": command_line(), "commit": source_commit(), "load": os.getloadavg()[0]}
    print(json.dumps({**about, "rows": rows}))


if __name__ == "__main__":
    main()
