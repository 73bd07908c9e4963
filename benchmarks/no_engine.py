"""A gateway whose engine computes nothing, in a process of its own: what `benchmarks.gateway_cost` measures.

Run as a file, so that the packages come from whichever checkout PYTHONPATH names. It prints its port, then answers each
line of standard input with the CPU seconds so far, of the event loop's thread and of the process.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import dataclasses
import json
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil

TEXT = "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness. "


class NoEngine:
    """An `Engine` whose model says the same text for ever and takes no time."""

    def __init__(self, tokenizer: Any, step_s: float) -> None:
        from nsm_core.config import EngineConfig
        from nsm_core.stats import EngineStats

        self.config = EngineConfig(max_slots=1024, token_budget=1024)
        self._tokenizer = tokenizer
        self._ids = tokenizer.encode(TEXT)
        self._step_s = step_s
        self._stats = EngineStats(max_slots=1024)
        self._running: dict[str, tuple[Any, Any, list[int]]] = {}
        self._tagged = TaggedRows(self._ids)
        self.may_overlap = True  # so that it is asked for its arrays
        self.is_preparing = False  # which older checkouts ask for
        self.grammars = grammars(tokenizer)
        self.interrupt = threading.Event()  # which nothing waits for: steps here are short

    @property
    def has_work(self) -> bool:
        return bool(self._running)

    def check(self, request: Any) -> None:
        """Takes everything."""

    def rest(self) -> None:
        """There is no memory to give back."""

    def rest_due_s(self, most: float) -> float:
        """Nothing is left to prepare."""
        return most

    def stats(self) -> Any:
        return dataclasses.replace(self._stats)

    def add(self, request: Any, *, tag: int | None = None, **options: Any) -> None:
        from nsm_core.engine.output import OutputStream

        is_tagged = tag is not None and request.has_free_text
        output = OutputStream(self._tokenizer, request.sampling, **({"has_text": False} if is_tagged else {}))
        self._running[request.request_id] = (request, output, [])
        if tag is not None and is_tagged and self._step_s:
            self._tagged.open(request.request_id, tag, request.sampling.max_tokens)

    def text_of(self, request: Any) -> Any:
        from nsm_core.engine.token_text import TokenText

        return TokenText(self._tokenizer, request)

    def take_tokens(self) -> Any:
        return self._tagged.take()

    def cancel(self, request_id: str) -> None:
        from nsm_core.engine.request import FinishReason

        if request_id in self._running:
            self._running[request_id][2].append(-1)
            self._tagged.end(request_id)
            self._ended = FinishReason.ABORT

    def abort_all(self) -> list[tuple[str, Any]]:
        return [self._finish(request_id, "abort") for request_id in list(self._running)]

    def step(self) -> list[tuple[str, Any]]:
        if self._step_s and self._running:
            time.sleep(self._step_s)
        events: list[tuple[str, Any]] = []
        for request_id in self._tagged.step(self._running):
            num_new = 1 if self._step_s else self._running[request_id][0].sampling.max_tokens
            events += self._advance(request_id, num_new)
        return events

    def _advance(self, request_id: str, num_new: int) -> Iterator[tuple[str, Any]]:
        from nsm_core.engine.request import TokenEvent

        request, output, sampled = self._running[request_id]
        self._tagged.fill(request_id, sampled)
        if sampled and sampled[-1] < 0:
            yield self._finish(request_id, "abort")
            return
        for _ in range(num_new):
            token_id = self._ids[len(sampled) % len(self._ids)]
            sampled.append(token_id)
            self._tagged.count(request_id)
            text = output.feed_plain(token_id)  # as the real engine does for tokens that only add text
            yield request_id, TokenEvent(index=len(sampled), token_id=token_id, text=text)
        if len(sampled) == request.sampling.max_tokens:
            yield self._finish(request_id, "length")

    def _finish(self, request_id: str, reason: str) -> tuple[str, Any]:
        from nsm_core.engine.request import EndState, Finished, FinishReason

        request, output, sampled = self._running.pop(request_id)
        self._tagged.close(request_id)
        end, cached = None, 0 if request.resume is None else request.resume.position
        if request.keep_state and reason == "length":
            new_ids = (*request.prompt_ids, *sampled)
            position = cached + len(new_ids) - 1
            end = EndState(
                state=position.to_bytes(8, "little"),
                position=position,
                pending=sampled[-1],
                new_ids=new_ids,
                generated_counts=collections.Counter(sampled),
            )
        finished = Finished(
            reason=FinishReason(reason),
            text=output.finish(),
            prompt_tokens=cached + len(request.prompt_ids),
            cached_tokens=cached,
            completion_tokens=len(sampled),
            end_state=end,
        )
        return request_id, finished


class TaggedRows:
    """Requests whose plain tokens are reported as arrays, as `TokenRows` has them."""

    def __init__(self, ids: list[int]) -> None:
        self._ids = np.array(ids)
        self._tags, self._counts, self._limits = np.full(1024, -1), np.zeros(1024, int), np.zeros(1024, int)
        self._rows: dict[str, int] = {}
        self._names = [""] * 1024
        self._free = list(range(1024))
        self._plain: Any = np.zeros(1024, bool)

    def open(self, request_id: str, tag: int, limit: int) -> None:
        row = self._rows[request_id] = self._free.pop()
        self._names[row] = request_id
        self._tags[row], self._counts[row], self._limits[row] = tag, 0, limit

    def close(self, request_id: str) -> None:
        row = self._rows.pop(request_id, None)
        if row is not None:
            self._tags[row] = -1
            self._free.append(row)

    def end(self, request_id: str) -> None:
        """The request has no further plain token."""
        if request_id in self._rows:
            self._limits[self._rows[request_id]] = 0

    def step(self, running: dict[str, Any]) -> list[str]:
        """Begins a step. Returns the ids of `running` that get an event, not a plain token."""
        is_open = self._tags >= 0
        self._plain = is_open & (self._counts > 0) & (self._counts < self._limits - 1)
        others = [self._names[row] for row in np.flatnonzero(is_open & ~self._plain).tolist()]
        return others if len(running) == len(self._rows) else [*others, *(running.keys() - self._rows.keys())]

    def take(self) -> list[Any]:
        from nsm_core.engine.token_rows import TokenBatch

        if not self._plain.any():
            return []
        counts = self._counts[self._plain]
        batch = TokenBatch(self._tags[self._plain], self._ids[counts % len(self._ids)])
        self._counts[self._plain] += 1
        self._plain[:] = False
        return [batch]

    def count(self, request_id: str) -> None:
        """A token was an event."""
        row = self._rows.get(request_id)
        if row is not None:
            self._counts[row] += 1

    def fill(self, request_id: str, sampled: list[int]) -> None:
        """Adds the tokens that the engine reported as arrays to `sampled`."""
        row = self._rows.get(request_id)
        if row is not None and not (sampled and sampled[-1] < 0):
            missing = np.arange(len(sampled), self._counts[row])
            sampled += self._ids[missing % len(self._ids)].tolist()


class NoBackend:
    """An InferenceBackend over NoEngine."""

    def __init__(self, tokenizer: Path, step_s: float) -> None:
        from nsm_core.engine.async_engine import AsyncEngine
        from nsm_core.state.layout import TensorLayout
        from nsm_core.tokenizer import BpeTokenizer
        from service.backends.base import ModelInfo

        self.tokenizer = BpeTokenizer.load(tokenizer)
        self.engine: Any = AsyncEngine(NoEngine(self.tokenizer, step_s), **pace())  # type: ignore[arg-type]
        self.start, self.stop, self.submit = self.engine.start, self.engine.stop, self.engine.submit
        self.listen_tokens = getattr(self.engine, "listen_tokens", None)
        self.is_ready, self.stats = self.engine.is_ready, self.engine.stats
        self.require_room = getattr(self.engine, "require_room", None)  # which older checkouts do not ask for
        self.max_requests = 1024
        tensor: Any = {"name": "position", "shape": [], "dtype": "int64"}  # as older checkouts have it
        if "TensorLayout" in str(ModelInfo.__annotations__["state_layout"]):
            tensor = TensorLayout("position", (), "int64")
        self.model = ModelInfo(
            name="none",
            fingerprint="none",
            numerics="none",
            created=0,
            vocab_size=self.tokenizer.vocab_size,
            num_parameters=0,
            state_bytes=8,
            state_layout=(tensor,),
            chat_template="plain-v1",
        )
        if "replays_exactly" in ModelInfo.__annotations__:  # older checkouts store each turn's state
            self.model = dataclasses.replace(self.model, replays_exactly=True)

    async def fetch_state(self, number: int) -> None:
        """None is held."""

    async def find_state(self, name: str) -> None:
        """None is held."""

    def name_state(self, name: str, number: int, about: bytes) -> None:
        """None is held."""

    def forget_state(self, name: str) -> None:
        """None is held."""

    def drop_state(self, number: int) -> None:
        """None is held."""

    async def inspect_state(self, *args: Any, **options: Any) -> Any:
        raise NotImplementedError("no state to look at")


def grammars(tokenizer: Any) -> Any:
    """The compiler that an engine has, where the checkout has one."""
    try:
        from nsm_core.grammars.compiler import GrammarCompiler
    except ImportError:
        return None
    return GrammarCompiler(tokenizer)


def pace() -> dict[str, Any]:
    """The gateway's own default, where the checkout has it."""
    try:
        from nsm_core.engine.stream_pace import MAX_INTERVAL_S, StreamPace
    except ImportError:
        return {}
    return {"pace": StreamPace(MAX_INTERVAL_S)}


def freeze() -> None:
    """As the checkout's server does once it has started, if it does."""
    try:
        from nsm_core.heap import freeze_objects
    except ImportError:
        return
    freeze_objects()


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


def serve_engine(tokenizer: Path, step_ms: float, path: str) -> None:
    """The engine alone, behind a Unix socket, until the standard input ends."""
    import uvicorn

    from service.backends.process.server import EngineServer

    async def main() -> None:
        backend: Any = NoBackend(tokenizer, step_ms / 1e3)
        await backend.start()
        with socket.socket(socket.AF_UNIX) as sock:
            sock.bind(path)
            sock.listen()
            server = EngineServer(backend)
            await server.serve(sock)
            freeze()
            print("ready", flush=True)
            await asyncio.to_thread(sys.stdin.read)
            await backend.stop()
            await server.stop()

    with asyncio.Runner(loop_factory=uvicorn.Config(app="").get_loop_factory()) as runner:
        runner.run(main())


class EngineProcess:
    """This file once more, as the engine's process."""

    def __init__(self, tokenizer: Path, step_ms: float) -> None:
        self._directory = tempfile.TemporaryDirectory()
        self.path = Path(self._directory.name) / "engine.sock"
        command = [sys.executable, __file__, "--tokenizer", str(tokenizer), "--step-ms", str(step_ms)]
        self._process = subprocess.Popen(
            [*command, "--engine", str(self.path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        if self._process.stdout is None or not self._process.stdout.readline():
            raise RuntimeError("the engine's process did not start")

    def cpu_s(self) -> float:
        times = psutil.Process(self._process.pid).cpu_times()
        return times.user + times.system

    def stop(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait(30)
        self._directory.cleanup()


def serve(tokenizer: Path, step_ms: float, store: str, *, is_split: bool) -> None:
    """Prints the port, then answers each line of standard input with one of JSON."""
    import uvicorn

    from nsm_core.tokenizer import encode_on_one_thread
    from service.app import create_app
    from service.server import bind, uvicorn_config
    from service.settings import Settings
    from service.stores.sessions.factory import make_store
    from service.telemetry.logs import configure_logging

    configure_logging("info")
    encode_on_one_thread()
    directory = tempfile.TemporaryDirectory()  # of a store that is a file
    settings = Settings(prefix_cache_mb=0, store=store, port=0, data_dir=Path(directory.name))
    engine = EngineProcess(tokenizer, step_ms) if is_split else None
    backend: Any = NoBackend(tokenizer, step_ms / 1e3) if engine is None else reach(engine.path)
    app = create_app(settings, backend, make_store(settings))
    config = uvicorn_config(app)
    config.app = Ceiling(app)
    loop_clock = time.pthread_getcpuclockid(threading.main_thread().ident or 0)

    async def main(sock: Any) -> None:
        async with app.router.lifespan_context(app):
            server = uvicorn.Server(config)

            def answer() -> None:
                for _ in sys.stdin:
                    elsewhere_s = 0.0 if engine is None else engine.cpu_s()
                    clocks = {"loop_s": time.clock_gettime(loop_clock), "process_s": time.process_time() + elsewhere_s}
                    print(json.dumps(clocks), flush=True)
                server.should_exit = True

            serving = asyncio.create_task(server.serve(sockets=[sock]))
            while not server.started:  # noqa: ASYNC110  # uvicorn tells nobody
                await asyncio.sleep(0.01)
            print(sock.getsockname()[1], flush=True)
            threading.Thread(target=answer, daemon=True).start()
            freeze()
            await serving

    with bind("127.0.0.1", 0) as sock, asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
        runner.run(main(sock))
    directory.cleanup()
    if engine is not None:
        engine.stop()


def reach(path: Path) -> Any:
    """The backend of a worker."""
    from nsm_core.engine.stream_pace import MAX_INTERVAL_S
    from service.backends.process.backend import ProcessBackend

    return ProcessBackend(path, max_interval_s=MAX_INTERVAL_S)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--step-ms", type=float, required=True)
    parser.add_argument("--store", default="memory")
    parser.add_argument("--split", action="store_true", help="the engine in a process of its own")
    parser.add_argument("--engine", help="be that process, on a socket of this path")
    given = parser.parse_args()
    if given.engine is not None:
        serve_engine(given.tokenizer, given.step_ms, given.engine)
    else:
        serve(given.tokenizer, given.step_ms, given.store, is_split=given.split)
