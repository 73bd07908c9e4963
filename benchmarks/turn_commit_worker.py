"""One process of `benchmarks.turn_commit`: turns on one store, with the packages of the checkout that PYTHONPATH names.

Run as a file. `--mode turns`: an engine that computes nothing and gives the state in the file `--state`. `--mode cold`:
pulse-books, and the first token of a turn on a second gateway. Prints one line of JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import httpx

SNAPSHOT_TOKENS = 102


def state_backend(tokenizer: Path, state: bytes) -> Any:
    """An InferenceBackend that says the same text for ever and ends with the same state."""
    from benchmarks.no_engine import NoBackend, NoEngine
    from nsm_core.engine.async_engine import AsyncEngine
    from nsm_core.state.layout import TensorLayout

    class StateEngine(NoEngine):
        def _finish(self, request_id: str, reason: str) -> tuple[str, Any]:
            name, finished = super()._finish(request_id, reason)
            if finished.end_state is not None:
                end = dataclasses.replace(finished.end_state, state=state)
                finished = dataclasses.replace(finished, end_state=end)
            return name, finished

    backend: Any = NoBackend(tokenizer, 0.0)
    engine: Any = AsyncEngine(StateEngine(backend.tokenizer, 0.0))  # type: ignore[arg-type]
    backend.engine = engine
    backend.start, backend.stop, backend.submit = engine.start, engine.stop, engine.submit
    backend.is_ready, backend.stats, backend.require_room = engine.is_ready, engine.stats, engine.require_room
    layout = (TensorLayout("state", (len(state) // 4,), "float32"),)
    changes: dict[str, Any] = {"state_layout": layout, "state_bytes": len(state), "fingerprint": "fixed"}
    if "replays_exactly" in {field.name for field in dataclasses.fields(backend.model)}:
        changes["replays_exactly"] = True
    backend.model = dataclasses.replace(backend.model, **changes)
    return backend


@contextlib.asynccontextmanager
async def gateway(backend: Any, store_url: str, **settings: Any) -> Any:
    """The application, its client and its store."""
    from service.app import create_app
    from service.settings import Settings
    from service.stores.sessions.factory import make_store

    wanted = Settings(prefix_cache_mb=0, store=store_url, data_dir=Path("unused"), **settings)
    app = create_app(wanted, backend, make_store(wanted))
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(base_url="http://localhost", transport=transport, timeout=600) as client:
            yield app, client


def run(work: Coroutine[Any, Any, dict[str, Any]]) -> dict[str, Any]:
    """Its result, in a process that is like the server's: the event loop, the collector of garbage."""
    import uvicorn

    from benchmarks.no_engine import freeze

    freeze()
    with asyncio.Runner(loop_factory=uvicorn.Config(app="").get_loop_factory()) as runner:
        return runner.run(work)


async def say(client: Any, session_id: str, body: dict[str, Any]) -> Any:
    response = await client.post(f"/v1/sessions/{session_id}/generate", json={"ignore_eos": True, **body})
    response.raise_for_status()
    return response.json()


def snapshot_limit(num_tokens: int | None) -> dict[str, int]:
    """None: the server's own, of one that has measured no reading yet. Earlier builds have no limit."""
    from service.settings import Settings

    if num_tokens is None or "snapshot_tokens" not in Settings.model_fields:
        return {}
    return {"snapshot_tokens": num_tokens}


async def take_turns(args: argparse.Namespace) -> dict[str, Any]:
    """Turns one after the other in each of several sessions."""
    backend, commits = state_backend(args.tokenizer, args.state.read_bytes()), []
    async with gateway(backend, args.store, **snapshot_limit(args.snapshot_tokens)) as (app, client):
        services = app.state.services
        sessions = services.metrics.sessions
        name = "turn_committed" if hasattr(sessions, "turn_committed") else "state_committed"  # of earlier builds
        committed = getattr(sessions, name)

        def noted(seconds: float, **options: Any) -> None:
            commits.append(seconds)
            committed(seconds, **options)

        setattr(sessions, name, noted)  # reading the registry would take longer than the commit

        async def one(session_id: str) -> None:
            (await client.post("/v1/sessions", json={"id": session_id})).raise_for_status()
            for _ in range(args.turns):
                await say(client, session_id, {"input": "And then?", "max_tokens": args.tokens})

        cpu_s, started = time.process_time(), time.perf_counter()
        await asyncio.gather(*(one(f"{args.name}-{number}") for number in range(args.sessions)))
        wall_s, cpu_s = time.perf_counter() - started, time.process_time() - cpu_s
        await written(services)
        num_written = written_bytes(args.writer)
        in_use = await services.store.usage(tenant="default")
        await rest(services)
        at_rest = await services.store.usage(tenant="default")
        snapshots = services.metrics.registry.get_sample_value("nsm_snapshots_total", {"outcome": "stored"})
    return {
        "wall_s": wall_s,
        "cpu_s": cpu_s,
        "num_turns": args.turns * args.sessions,
        "commit_ms": sorted(1000 * seconds for seconds in commits),
        "bytes_in_use": in_use.num_bytes,
        "bytes_at_rest": at_rest.num_bytes,
        "snapshots": snapshots,
        "num_written": num_written,
    }


def written_bytes(process_id: int | None) -> int:
    """Bytes that the process, None for this one, caused to be written to storage."""
    lines = Path(f"/proc/{process_id or 'self'}/io").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("write_bytes")))


async def written(services: Any) -> None:
    """Waits for the snapshots that follow the turns. Earlier builds have none."""
    with contextlib.suppress(AttributeError):
        writing = services.turns.keeper._writer._task
        if writing is not None:
            await asyncio.wait((writing,))


async def rest(services: Any) -> None:
    """What happens when the server stops, and to sessions that nobody uses any more. Earlier builds do neither."""
    with contextlib.suppress(ImportError):
        from service.state.resting import shed_once

        keeper = services.turns.keeper
        await keeper.drain()
        await shed_once(services.store, keeper, cold_after_s=None, older_s=0.0)


async def large(args: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds of a turn of one token on a gateway that never saw the session, whose state of so many bytes is
    stored; the engine computes nothing. Half of a number's bits are noise, as in real states.
    """
    import numpy as np

    rng, found = np.random.default_rng(1), []
    state = rng.standard_normal(args.state_bytes // 4, dtype=np.float32).tobytes()
    settings = {**snapshot_limit(SNAPSHOT_TOKENS), "state_cache_mb": 1024}
    async with gateway(state_backend(args.tokenizer, state), args.store, **settings) as (app, client):
        (await client.post("/v1/sessions", json={"id": "s"})).raise_for_status()
        await say(client, "s", {"input": [7] * 2 * SNAPSHOT_TOKENS, "max_tokens": 1})
        started = time.perf_counter()
        await app.state.services.turns.keeper.drain(timeout_s=120.0)
        stored_ms = 1000 * (time.perf_counter() - started)
        for _ in range(args.turns):
            async with gateway(state_backend(args.tokenizer, state), args.store, **settings) as (_, other):
                copy = (await other.post("/v1/sessions/s/fork", json={})).json()["id"]
                started = time.perf_counter()
                answer = await say(other, copy, {"input": "x", "max_tokens": 1})
                found.append(1000 * (time.perf_counter() - started))
                details = answer["usage"]["prompt_tokens_details"]
                if not details["cached_tokens"]:
                    raise RuntimeError("the state did not come from the store")
    return {"stored_ms": stored_ms, "ms": found}


async def first_token(app: Any, session_id: str, text: Any) -> tuple[float, dict[str, int]]:
    """Milliseconds until the first frame of a streamed turn of two tokens, and the token counts of its usage. Without
    httpx, which gives an application's answer as a whole.
    """
    body = {"input": text, "max_tokens": 2, "ignore_eos": True, "stream": True}
    raw = json.dumps({**body, "stream_options": {"include_usage": True}}).encode()
    path, first_ms, frames = f"/v1/sessions/{session_id}/generate", 0.0, b""
    headers = {"host": "localhost", "content-type": "application/json", "content-length": str(len(raw))}
    scope: dict[str, Any] = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
    }
    scope |= {"path": path, "raw_path": path.encode(), "query_string": b"", "root_path": ""}
    scope |= {"client": ("127.0.0.1", 1), "server": ("localhost", 80)}
    scope["headers"] = [(name.encode(), value.encode()) for name, value in headers.items()]
    requests, never = [{"type": "http.request", "body": raw, "more_body": False}], asyncio.Event()

    async def receive() -> dict[str, Any]:
        if not requests:
            await never.wait()  # the client stays
        return requests.pop()

    async def send(message: dict[str, Any]) -> None:
        nonlocal first_ms, frames
        if message["type"] == "http.response.start" and message["status"] != 200:
            raise RuntimeError(f"status {message['status']}")
        frames += message.get("body", b"")
        if b"data:" in frames and not first_ms:
            first_ms = 1000 * (time.perf_counter() - started)

    started = time.perf_counter()
    await app(scope, receive, send)
    chunks = [json.loads(line[5:]) for line in frames.split(b"\n") if line.startswith(b"data: {")]
    details = next(chunk["usage"] for chunk in reversed(chunks) if chunk.get("usage"))["prompt_tokens_details"]
    return first_ms, details


async def cold(args: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds until the first token of a turn on a gateway that never saw the session, and tokens that it read
    again. It has served others: a turn of another session comes before.

    `ms`: the session has just had a turn of 32 tokens elsewhere, after a snapshot. `stored_ms`: the snapshot is of the
    head, as when nobody has used the session for a minute. `read_ms`: of a turn that reads as many tokens as `ms`, new
    ones, where the state is in memory.
    """
    import torch

    from benchmarks.measured_model import MEASURED_MODEL
    from nsm_core.config import EngineConfig
    from nsm_core.model.loader import load_checkpoint
    from service.backends.local import LocalBackend

    torch.set_num_threads(1)
    found: dict[str, list[float]] = {"replayed": [], "ms": [], "read_ms": [], "stored_ms": []}

    @contextlib.asynccontextmanager
    async def replica() -> Any:
        backend = LocalBackend(load_checkpoint(MEASURED_MODEL), EngineConfig())
        async with gateway(backend, args.store) as (app, client):
            (await client.post("/v1/sessions", json={"id": "other"})).raise_for_status()
            await say(client, "other", {"input": [7] * 64, "max_tokens": 2})
            yield app, client
            await client.delete("/v1/sessions/other")

    async with replica() as (warm_app, warm):
        (await warm.post("/v1/sessions", json={"id": "s"})).raise_for_status()
        await say(warm, "s", {"input": [7] * args.context, "max_tokens": 1})
        await written(warm_app.state.services)
        await warm.delete("/v1/sessions/other")

        async def copied() -> str:
            """A session like "s" with a turn and a snapshot of its own."""
            copy: str = (await warm.post("/v1/sessions/s/fork", json={})).json()["id"]
            await say(warm, copy, {"input": "And then?", "max_tokens": 32})
            await warm_app.state.services.turns.keeper.drain()
            return copy

        for _ in range(args.turns):
            behind, stored = await copied(), await copied()
            await say(warm, behind, {"input": "And then?", "max_tokens": 32})
            again = (await warm.post(f"/v1/sessions/{behind}/fork", json={})).json()["id"]
            async with replica() as (app, _):
                ms, details = await first_token(app, behind, "x")
                stored_ms, at_head = await first_token(app, stored, "x")
            if at_head.get("replayed_tokens") or not at_head["cached_tokens"]:
                raise RuntimeError("the state did not come from the store")
            num_replayed = details.get("replayed_tokens", 0)
            read_ms, _ = await first_token(warm_app, again, [7] * (num_replayed + 1))
            measured = {"replayed": num_replayed, "ms": ms, "read_ms": read_ms, "stored_ms": stored_ms}
            for name, value in measured.items():
                found[name].append(value)
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mode", choices=("turns", "cold", "large"), required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--store", required=True)
    parser.add_argument("--writer", type=int, default=None, help="process that writes, if it is another one")
    parser.add_argument("--name", default="s")
    parser.add_argument("--turns", type=int, required=True)
    parser.add_argument("--sessions", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--state", type=Path, default=None)
    parser.add_argument("--context", type=int, default=32_768)
    parser.add_argument("--snapshot-tokens", type=int, default=None)
    parser.add_argument("--state-bytes", type=int, default=0)
    given = parser.parse_args()
    modes = {"turns": take_turns, "cold": cold, "large": large}
    print(json.dumps(run(modes[given.mode](given))))
