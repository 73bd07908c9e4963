"""What the gateway costs per token: `python -m benchmarks.gateway_cost`. A table, then one line of JSON.

The real application behind the real server settings on a real socket, with an engine that computes nothing: each step
gives every running request its next token, decoded as the real engine does it, through the real `AsyncEngine`. So what
is counted is HTTP, server-sent events, decoding and metrics, in CPU microseconds of the server's process per token; its
clients are another process. "paced": a step lasts `--step-ms`, in which the engine's thread sleeps; tokens come one by
one, as from a model. "burst": all tokens of a request are there at once.

`--against DIR` measures another checkout beside this one, in turns, in the same run. Two bare applications on the same
server, one write a token, say what no gateway can do without. The parts are this checkout's, each alone and warm; the
rest of the cost is the event loop, system calls, uvicorn, and code and data that are not in the caches when a step
ends.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from benchmarks.no_engine import TEXT
from nsm_core.engine.output import OutputStream
from nsm_core.engine.request import TokenEvent
from nsm_core.sampling.params import SamplingParams
from nsm_core.tokenizer import BpeTokenizer
from nsm_lab.provenance import command_line, source_commit
from service.generate.deltas import DeltaBuilder
from service.telemetry.metrics.requests import RequestMetrics
from service.web.sse import TextFrame, frame

HERE = Path(__file__).resolve()
SERVER = HERE.parent / "no_engine.py"  # which runs with the packages of the checkout that is measured
TOKENIZER = next((HERE.parent.parent / "nsm_core" / "model" / "checkpoints").rglob("tokenizer.json"))
ENDPOINTS: dict[str, tuple[str, dict[str, Any]]] = {
    "completions": ("/v1/completions", {"prompt": "x"}),
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
    "sessions": ("/v1/sessions/{}/generate", {"input": "x"}),
    "responses": ("/v1/responses", {"input": "x"}),
    "free": ("/v1/responses", {"input": "x", "store": False}),
    "bare": ("/bare", {}),
    "starlette": ("/starlette", {}),
}


class Server:
    """A checkout's server."""

    def __init__(self, name: str, root: Path, step_ms: float, *, store: str = "memory", is_split: bool = False) -> None:
        self.name = name
        command = [sys.executable, str(SERVER), "--step-ms", str(step_ms), "--tokenizer", str(TOKENIZER)]
        command += ["--store", store, *(["--split"] if is_split else [])]
        environ = {**os.environ, "PYTHONPATH": str(root), "PYTHONSAFEPATH": "1"}
        self._log = tempfile.TemporaryFile(mode="w+")  # noqa: SIM115  # a line for each request, until it stops
        self._process = subprocess.Popen(
            command, cwd=root, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True
        )
        line = self._output().readline()
        if not line:
            self._log.seek(0)
            raise RuntimeError(f"the server of {root} did not start: {self._log.read()[-2000:]}")
        self.port = int(line)

    def clocks(self) -> dict[str, float]:
        """CPU seconds so far."""
        if self._process.stdin is None:
            raise RuntimeError("the server has no standard input")
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        answer: dict[str, float] = json.loads(self._output().readline())
        return answer

    def stop(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait(30)
        self._output().close()
        self._log.close()

    def _output(self) -> Any:
        return self._process.stdout


class Reader(asyncio.Protocol):
    """Counts frames of one answer, and keeps its bytes in `parts`."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self._tail = b""
        self.num_frames = 0
        self.parts: list[bytes] = []
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.write(self._request)  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        self.num_frames += data.count(b"data: {") + data.count(b"data: x")
        self.parts.append(data)
        self._tail = (self._tail + data)[-16:]
        if self._tail.endswith(b"0\r\n\r\n") and not self.done.done():
            self.done.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(error or ConnectionError("the server closed the connection"))


async def read_streams(server: Server, endpoint: str, number: int, num_tokens: int) -> float:
    """Frames per token over all streams."""
    path, fields = ENDPOINTS[endpoint]
    if path == "/v1/responses":
        body = {**fields, "max_output_tokens": num_tokens, "stream": True}
    elif endpoint in ("bare", "starlette"):
        body = {"max_tokens": num_tokens}
    else:
        body = {**fields, "max_tokens": num_tokens, "stream": True, "ignore_eos": True}
    readers = []
    for stream in range(number):
        target = path.format(f"s{time.monotonic_ns()}{stream}")
        if "sessions" in path:
            await create_session(server.port, target.split("/")[3])
        raw = json.dumps(body).encode()
        lines = [f"POST {target} HTTP/1.1", "host: localhost", "content-type: application/json"]
        head = "\r\n".join([*lines, f"content-length: {len(raw)}", "", ""])
        reader = Reader(head.encode() + raw)
        readers.append(reader)
    loop = asyncio.get_running_loop()
    transports = []
    for reader in readers:
        transport, _ = await loop.create_connection(lambda reader=reader: reader, "127.0.0.1", server.port)  # type: ignore[misc]
        transports.append(transport)
    await asyncio.gather(*(reader.done for reader in readers))
    for transport, reader in zip(transports, readers, strict=True):
        check(b"".join(reader.parts), endpoint, num_tokens)
        transport.close()
    return sum(reader.num_frames for reader in readers) / (number * num_tokens)


async def create_session(port: int, session_id: str) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    raw = json.dumps({"id": session_id}).encode()
    head = "POST /v1/sessions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    writer.write(f"{head}content-length: {len(raw)}\r\nconnection: close\r\n\r\n".encode() + raw)
    status = await reader.readline()
    if b" 20" not in status:
        raise RuntimeError(f"no session: {status!r}")
    writer.close()


def check(raw: bytes, endpoint: str, num_tokens: int) -> None:
    """The answer has all tokens: their text, once, in order."""
    if endpoint in ("bare", "starlette"):
        return
    events = [json.loads(line[6:]) for line in raw.split(b"\n") if line.startswith(b"data: {")]
    if ENDPOINTS[endpoint][0] == "/v1/responses":
        text = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
        is_whole = events[-1]["type"] == "response.incomplete"
    else:
        choices = [event["choices"][0] for event in events]
        text = "".join(choice.get("text", choice.get("delta", {}).get("content", "")) for choice in choices)
        is_whole = b"data: [DONE]" in raw and choices[-1]["finish_reason"] == "length"
    if not is_whole or len(text) < num_tokens:
        raise RuntimeError(f"{endpoint}: a wrong answer, {raw[:300]!r} … {raw[-300:]!r}")
    if not (TEXT * num_tokens).startswith(text):
        raise RuntimeError(f"{endpoint}: a wrong text, {text[:100]!r}")


def measure(server: Server, endpoint: str, number: int, num_tokens: int) -> dict[str, float]:
    before, started = server.clocks(), time.perf_counter()
    frames = asyncio.run(read_streams(server, endpoint, number, num_tokens))
    wall_s, after = time.perf_counter() - started, server.clocks()
    per_token = 1e6 / (number * num_tokens)
    loop_s = after["loop_s"] - before["loop_s"]
    process_s = after["process_s"] - before["process_s"]
    return {
        "cpu_us": process_s * per_token,
        "loop_us": loop_s * per_token,
        "engine_us": (process_s - loop_s) * per_token,
        "frames_per_token": frames,
        "tokens_per_s": number * num_tokens / wall_s,
    }


def parts() -> dict[str, float]:
    """CPU microseconds per token of what this checkout does with one, each part alone."""
    tokenizer = BpeTokenizer.load(TOKENIZER)
    ids = tokenizer.encode(TEXT) * 40
    output = OutputStream(tokenizer, SamplingParams(max_tokens=len(ids)))
    events = [TokenEvent(index=index, token_id=token_id, text="word") for index, token_id in enumerate(ids)]
    view, record = DeltaBuilder(tokenizer), RequestMetrics(CollectorRegistry()).start(arrival=time.monotonic())
    text_frame = TextFrame(lambda text: frame({"id": "x" * 40, "choices": [{"index": 0, "text": text}]}))
    return {
        "detokenise": _us(output.feed, ids),
        "event": _us(lambda token_id: TokenEvent(index=1, token_id=token_id, text="word"), ids),
        "choice": _us(view.feed, events),
        "metrics": _us(lambda _: record.token(), ids),
        "frame": _us(text_frame, [event.text for event in events]),
    }


def _us(work: Callable[[Any], object], items: Sequence[Any]) -> float:
    """CPU microseconds an item, the least of five."""
    taken = []
    for _ in range(5):
        started = time.process_time()
        for item in items:
            work(item)
        taken.append((time.process_time() - started) / len(items) * 1e6)
    return min(taken)


def compare(args: argparse.Namespace, name: str, step_ms: float) -> dict[str, Any]:
    """All endpoints of one way that tokens come."""
    result: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        servers = [Server("this", HERE.parent.parent, step_ms, is_split=args.split)]
        stack.callback(servers[0].stop)
        if args.against is not None:
            servers.insert(0, Server("against", args.against.resolve(), step_ms, is_split=args.split))
            stack.callback(servers[0].stop)
        for endpoint in args.endpoints:
            used = servers[-1:] if endpoint in ("bare", "starlette") else servers
            rows: dict[str, list[dict[str, float]]] = {server.name: [] for server in used}
            for turn in range(args.repeats + 1):
                for server in used if turn % 2 else used[::-1]:
                    row = measure(server, endpoint, args.streams, args.tokens)
                    if turn:  # the first is a warm-up
                        rows[server.name].append(row)
            result[endpoint] = rows
            print_rows(name, endpoint, rows)
    return result


def print_rows(name: str, endpoint: str, rows: dict[str, list[dict[str, float]]]) -> None:
    for who, taken in rows.items():
        middle = {key: statistics.median(row[key] for row in taken) for key in taken[0]}
        costs = sorted(row["cpu_us"] for row in taken)
        print(
            f"{name:<6} {endpoint:<12} {who:<8} {middle['cpu_us']:>7.1f} {costs[0]:>6.1f}-{costs[-1]:<6.1f}"
            f" {middle['loop_us']:>7.1f} {middle['engine_us']:>7.1f} {middle['frames_per_token']:>6.2f}"
            f" {1e6 / middle['cpu_us']:>9.0f} {middle['tokens_per_s']:>8.0f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, help="another checkout, measured in turns with this one")
    parser.add_argument("--endpoints", nargs="+", choices=sorted(ENDPOINTS), default=list(ENDPOINTS))
    parser.add_argument("--modes", nargs="+", choices=("paced", "burst"), default=["paced", "burst"])
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=128, help="of each stream")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--step-ms", type=float, default=10.0, help="of a paced engine")
    parser.add_argument("--split", action="store_true", help="the engine in a process of its own, as with workers")
    args = parser.parse_args()
    head = f"{'':<28} {'cpu us':>7} {'range':^13} {'loop':>7} {'engine':>7} {'frames':>6} {'tok/cpu-s':>9} {'tok/s':>8}"
    print(head)
    modes = {name: compare(args, name, args.step_ms if name == "paced" else 0.0) for name in args.modes}
    alone = parts()
    print("parts, each alone: " + ", ".join(f"{name} {cost:.2f} us" for name, cost in alone.items()))
    about = {"command": command_line(), "commit": source_commit(), "streams": args.streams, "load": os.getloadavg()[0]}
    print(json.dumps({**about, "modes": modes, "parts": alone}))


if __name__ == "__main__":
    main()
