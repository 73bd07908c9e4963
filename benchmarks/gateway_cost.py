"""What the gateway costs per token: `python -m benchmarks.gateway_cost`. A table, then one line of JSON.

The real application behind the real server settings on a real socket, with an engine that computes nothing: each step
gives every running request its next token, decoded as the real engine does it, through the real `AsyncEngine`. So what
is counted is HTTP, server-sent events, decoding and metrics, in CPU microseconds of the server's process per token; its
clients are another process. "paced": a step lasts `--step-ms`, in which the engine's thread sleeps; tokens come one by
one, as from a model. "burst": all tokens of a request are there at once.

`--against DIR` measures another checkout beside this one, in turns, in the same run. Two bare ASGI applications on the
same server, one write a token, say what no gateway can do without. Parts come from a sampling profiler on the CPU time
of the event loop's thread, in rounds of their own.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import dataclasses
import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

HERE = Path(__file__).resolve()
TOKENIZER = next((HERE.parent.parent / "nsm_core" / "model" / "checkpoints").rglob("tokenizer.json"))
TEXT = "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness. "
PROFILE_S = 0.0005
# The innermost frame of these decides which part a sample belongs to; what is in no list is "other".
PARTS = {
    "HTTP and sockets": ("uvicorn/", "gateway_cost.py"),
    "framework": ("starlette/", "fastapi/"),
    "middleware": ("service/middleware.py", "service/authentication.py", "service/connections.py"),
    "events": ("service/sse.py",),
    "chunks as JSON": (
        "service/completions.py", "service/chat.py", "service/openai_format.py", "service/stream_format.py",
        "service/session_turns.py", "service/answers.py",
    ),
    "choices": ("service/choices.py", "service/generation.py", "service/turn"),
    "metrics": ("service/metrics", "prometheus_client/"),
    "hand-over": ("nsm_core/engine/async_engine.py",),
    "asyncio": ("asyncio/", "contextlib.py", "threading.py", "runpy"),
}  # fmt: skip
ENDPOINTS: dict[str, tuple[str, dict[str, Any]]] = {
    "completions": ("/v1/completions", {"prompt": "x"}),
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
    "sessions": ("/v1/sessions/{}/generate", {"input": "x"}),
    "bare": ("/bare", {}),
    "starlette": ("/starlette", {}),
}


# --- the server's process -------------------------------------------------------------------------------------------


class NoEngine:
    """An `Engine` whose model says the same text for ever and takes no time."""

    def __init__(self, tokenizer: Any, step_s: float) -> None:
        from nsm_core.config import EngineConfig
        from nsm_core.stats import EngineStats

        self.config = EngineConfig(max_slots=256, queue_limit=256)
        self._tokenizer = tokenizer
        self._ids = tokenizer.encode(TEXT)
        self._step_s = step_s
        self._stats = EngineStats(max_slots=256)
        self._running: dict[str, tuple[Any, Any, list[int]]] = {}

    @property
    def has_work(self) -> bool:
        return bool(self._running)

    def check(self, request: Any) -> None:
        """Takes everything."""

    def stats(self) -> Any:
        return dataclasses.replace(self._stats)

    def add(self, request: Any) -> None:
        from nsm_core.engine.output import OutputStream

        self._running[request.request_id] = (request, OutputStream(self._tokenizer, request.sampling), [])

    def cancel(self, request_id: str) -> None:
        from nsm_core.engine.request import FinishReason

        if request_id in self._running:
            self._running[request_id][2].append(-1)
            self._ended = FinishReason.ABORT

    def abort_all(self) -> list[tuple[str, Any]]:
        return [self._finish(request_id, "abort") for request_id in list(self._running)]

    def step(self) -> list[tuple[str, Any]]:
        if self._step_s and self._running:
            time.sleep(self._step_s)
        events: list[tuple[str, Any]] = []
        for request_id in list(self._running):
            num_new = 1 if self._step_s else self._running[request_id][0].sampling.max_tokens
            events += self._advance(request_id, num_new)
        return events

    def _advance(self, request_id: str, num_new: int) -> Iterator[tuple[str, Any]]:
        from nsm_core.engine.request import TokenEvent

        request, output, sampled = self._running[request_id]
        if sampled and sampled[-1] < 0:
            yield self._finish(request_id, "abort")
            return
        for _ in range(num_new):
            token_id = self._ids[len(sampled) % len(self._ids)]
            sampled.append(token_id)
            text = output.feed(token_id).text
            yield request_id, TokenEvent(index=len(sampled), token_id=token_id, text=text)
        if len(sampled) == request.sampling.max_tokens:
            yield self._finish(request_id, "length")

    def _finish(self, request_id: str, reason: str) -> tuple[str, Any]:
        from nsm_core.engine.request import EndState, Finished, FinishReason

        request, output, sampled = self._running.pop(request_id)
        end, cached = None, 0 if request.resume is None else request.resume.position
        if request.keep_state and reason == "length":
            new_ids = (*request.prompt_ids, *sampled)
            position = cached + len(new_ids) - 1
            end = EndState(state=b"12345678", position=position, pending=sampled[-1], new_ids=new_ids,
                           generated_counts=collections.Counter(sampled))  # fmt: skip
        finished = Finished(
            reason=FinishReason(reason),
            text=output.finish(),
            prompt_tokens=cached + len(request.prompt_ids),
            cached_tokens=cached,
            completion_tokens=len(sampled),
            end_state=end,
        )
        return request_id, finished


class NoBackend:
    """An InferenceBackend over NoEngine."""

    def __init__(self, tokenizer: Path, step_s: float) -> None:
        from nsm_core.engine.async_engine import AsyncEngine
        from nsm_core.tokenizer import Tokenizer
        from service.backends.base import ModelInfo

        self.tokenizer = Tokenizer.load(tokenizer)
        self.engine: Any = AsyncEngine(NoEngine(self.tokenizer, step_s))  # type: ignore[arg-type]
        self.start, self.stop, self.submit = self.engine.start, self.engine.stop, self.engine.submit
        self.is_ready, self.stats = self.engine.is_ready, self.engine.stats
        self.max_requests = 512
        self.model = ModelInfo(
            name="none",
            fingerprint="none",
            numerics="none",
            created=0,
            vocab_size=self.tokenizer.vocab_size,
            num_parameters=0,
            state_bytes=8,
            state_layout=({"name": "nothing", "shape": [1], "dtype": "int64"},),
            chat_template="plain-v1",
        )

    async def inspect_state(self, *args: Any, **options: Any) -> Any:
        raise NotImplementedError("no state to look at")


class Ceiling:
    """The application, and beside it two that only write prepared bytes, one for each token."""

    FRAME = b"data: " + b"x" * 250 + b"\n\n"

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["path"] not in ("/bare", "/starlette"):
            await self._app(scope, receive, send)
            return
        num_tokens = json.loads((await receive())["body"])["max_tokens"]
        if scope["path"] == "/starlette":
            from starlette.responses import StreamingResponse

            await StreamingResponse(self._frames(num_tokens), media_type="text/event-stream")(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        async for frame in self._frames(num_tokens):
            await send({"type": "http.response.body", "body": frame, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _frames(self, num_tokens: int) -> AsyncIterator[bytes]:
        for _ in range(num_tokens):
            yield self.FRAME
            await asyncio.sleep(0)
        yield b"data: [DONE]\n\n"


class Meter:
    """CPU seconds of this process by thread, and where the event loop's thread spends them."""

    def __init__(self) -> None:
        self._loop_clock = time.pthread_getcpuclockid(threading.main_thread().ident or 0)
        self._samples: collections.Counter[str] = collections.Counter()
        self._last = (0.0, 0.0)
        signal.signal(signal.SIGPROF, self._sample)

    def answer(self, command: str) -> dict[str, Any]:
        if command == "profile":
            self._samples.clear()
            signal.setitimer(signal.ITIMER_PROF, PROFILE_S, PROFILE_S)
        elif command == "no profile":
            signal.setitimer(signal.ITIMER_PROF, 0)
        loop_s, process_s = self._clocks()
        return {"loop_s": loop_s, "process_s": process_s, "samples": dict(self._samples)}

    def _clocks(self) -> tuple[float, float]:
        return time.clock_gettime(self._loop_clock), time.process_time()

    def _sample(self, number: int, frame: FrameType | None) -> None:
        loop_s, process_s = self._clocks()
        is_loop = loop_s - self._last[0] > (process_s - self._last[1]) / 2  # the timer counts all threads
        self._last = (loop_s, process_s)
        if is_loop:
            self._samples[_part_of(frame)] += 1


def _part_of(frame: FrameType | None) -> str:
    while frame is not None:
        name = frame.f_code.co_filename
        for part, places in PARTS.items():
            if any(place in name for place in places):
                return part
        frame = frame.f_back
    return "other"


def serve(tokenizer: Path, step_ms: float) -> None:
    """Prints the port, then answers each line of standard input with one of JSON."""
    import uvicorn

    from service.app import create_app
    from service.server import bind, configure_logging, uvicorn_config
    from service.sessions.memory import MemorySessionStore
    from service.settings import Settings

    configure_logging("warning")
    settings = Settings(prefix_cache=False, store="memory", port=0, log_level="warning", data_dir=Path("unused"))
    backend: Any = NoBackend(tokenizer, step_ms / 1e3)
    app = create_app(settings, backend, MemorySessionStore())
    config = uvicorn_config(app)
    config.app = Ceiling(app)
    meter = Meter()

    async def main(sock: Any) -> None:
        async with app.router.lifespan_context(app):
            server = uvicorn.Server(config)
            loop = asyncio.get_running_loop()

            def obey() -> None:
                for line in sys.stdin:
                    done = threading.Event()
                    answers: list[dict[str, Any]] = []

                    def ask(line: str = line, done: threading.Event = done, answers: Any = answers) -> None:
                        answers.append(meter.answer(line.strip()))  # the timer belongs to the main thread
                        done.set()

                    loop.call_soon_threadsafe(ask)
                    done.wait()
                    print(json.dumps(answers[0]), flush=True)
                server.should_exit = True

            print(sock.getsockname()[1], flush=True)
            threading.Thread(target=obey, daemon=True).start()
            await server.serve(sockets=[sock])

    with bind("127.0.0.1", 0) as sock, asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
        runner.run(main(sock))


# --- the clients' process -------------------------------------------------------------------------------------------


class Server:
    """A checkout's server."""

    def __init__(self, name: str, root: Path, step_ms: float) -> None:
        self.name = name
        command = [sys.executable, str(HERE), "--serve", "--step-ms", str(step_ms), "--tokenizer", str(TOKENIZER)]
        environ = {**os.environ, "PYTHONPATH": str(root), "PYTHONSAFEPATH": "1"}
        self._process = subprocess.Popen(
            command, cwd=root, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        line = self._output().readline()
        if not line:
            raise RuntimeError(f"the server of {root} did not start")
        self.port = int(line)

    def ask(self, command: str = "") -> dict[str, Any]:
        if self._process.stdin is None:
            raise RuntimeError("the server has no standard input")
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._output().readline())
        return answer

    def stop(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait(30)

    def _output(self) -> Any:
        return self._process.stdout


class Reader(asyncio.Protocol):
    """Counts frames of one answer. `text`: what they said, when it is wanted."""

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
    body = {**fields, "max_tokens": num_tokens}
    if endpoint not in ("bare", "starlette"):
        body |= {"stream": True, "ignore_eos": True}
    readers = []
    for stream in range(number):
        target = path.format(f"s{time.monotonic_ns()}{stream}")
        if "sessions" in path:
            await create_session(server.port, target.split("/")[3])
        raw = json.dumps(body).encode()
        head = (
            f"POST {target} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(raw)}\r\n\r\n"
        )
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
    head = f"POST /v1/sessions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(raw)}\r\n"
    writer.write(f"{head}connection: close\r\n\r\n".encode() + raw)
    status = await reader.readline()
    if b" 20" not in status:
        raise RuntimeError(f"no session: {status!r}")
    writer.close()


def check(raw: bytes, endpoint: str, num_tokens: int) -> None:
    """The answer has all tokens: their text, once, in order."""
    if endpoint in ("bare", "starlette"):
        return
    lines = [line[6:] for line in raw.split(b"\n") if line.startswith(b"data: {")]
    choices = [json.loads(line)["choices"][0] for line in lines]
    text = "".join(choice.get("text", choice.get("delta", {}).get("content", "")) for choice in choices)
    if b"data: [DONE]" not in raw or choices[-1]["finish_reason"] != "length" or len(text) < num_tokens:
        raise RuntimeError(f"{endpoint}: a wrong answer, {raw[:300]!r} … {raw[-300:]!r}")
    if not (TEXT * num_tokens).startswith(text):
        raise RuntimeError(f"{endpoint}: a wrong text, {text[:100]!r}")


def measure(server: Server, endpoint: str, number: int, num_tokens: int) -> dict[str, float]:
    before, started = server.ask(), time.perf_counter()
    frames = asyncio.run(read_streams(server, endpoint, number, num_tokens))
    wall_s, after = time.perf_counter() - started, server.ask()
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


def profile(server: Server, endpoint: str, number: int, num_tokens: int) -> dict[str, float]:
    """Shares of the loop's time by part."""
    server.ask("profile")
    asyncio.run(read_streams(server, endpoint, number, num_tokens))
    samples = server.ask("no profile")["samples"]
    total = sum(samples.values()) or 1
    return {part: samples[part] / total for part in sorted(samples, key=lambda part: -samples[part])}


def compare(args: argparse.Namespace, name: str, step_ms: float) -> dict[str, Any]:
    """All endpoints of one way that tokens come."""
    result: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        servers = [Server("this", HERE.parent.parent, step_ms)]
        stack.callback(servers[0].stop)
        if args.against is not None:
            servers.insert(0, Server("against", args.against.resolve(), step_ms))
            stack.callback(servers[0].stop)
        for endpoint in args.endpoints:
            used = servers[-1:] if endpoint in ("bare", "starlette") else servers
            rows: dict[str, list[dict[str, float]]] = {server.name: [] for server in used}
            for turn in range(args.repeats + 1):
                for server in used if turn % 2 else used[::-1]:
                    row = measure(server, endpoint, args.streams, args.tokens)
                    if turn:  # the first is a warm-up
                        rows[server.name].append(row)
            parts = {}
            if endpoint not in ("bare", "starlette"):
                parts = {server.name: profile(server, endpoint, args.streams, args.tokens) for server in used}
            result[endpoint] = {"rows": rows, "parts": parts}
            tell(name, endpoint, rows, parts)
    return result


def tell(name: str, endpoint: str, rows: dict[str, list[dict[str, float]]], parts: dict[str, dict[str, float]]) -> None:
    for who, taken in rows.items():
        middle = {key: statistics.median(row[key] for row in taken) for key in taken[0]}
        costs = sorted(row["cpu_us"] for row in taken)
        print(
            f"{name:<6} {endpoint:<12} {who:<8} {middle['cpu_us']:>7.1f} {costs[0]:>6.1f}-{costs[-1]:<6.1f}"
            f" {middle['loop_us']:>7.1f} {middle['engine_us']:>7.1f} {middle['frames_per_token']:>6.2f}"
            f" {1e6 / middle['cpu_us']:>9.0f} {middle['tokens_per_s']:>8.0f}"
        )
        if who in parts:
            shares = ", ".join(f"{part} {middle['loop_us'] * share:.1f}" for part, share in parts[who].items())
            print(f"{'':<28} of the loop: {shares}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--tokenizer", type=Path, default=TOKENIZER)
    parser.add_argument("--against", type=Path, help="another checkout, measured in turns with this one")
    parser.add_argument("--endpoints", nargs="+", choices=sorted(ENDPOINTS), default=list(ENDPOINTS))
    parser.add_argument("--modes", nargs="+", choices=("paced", "burst"), default=["paced", "burst"])
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=128, help="of each stream")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--step-ms", type=float, default=10.0, help="of a paced engine")
    args = parser.parse_args()
    if args.serve:
        serve(args.tokenizer, args.step_ms)
        return
    from nsm_core.evaluation.provenance import command_line, source_commit

    head = f"{'':<28} {'cpu us':>7} {'range':^13} {'loop':>7} {'engine':>7} {'frames':>6} {'tok/cpu-s':>9} {'tok/s':>8}"
    print(head)
    modes = {name: compare(args, name, args.step_ms if name == "paced" else 0.0) for name in args.modes}
    about = {"command": command_line(), "commit": source_commit(), "streams": args.streams, "load": os.getloadavg()[0]}
    print(json.dumps({**about, "modes": modes}))


if __name__ == "__main__":
    main()
