"""What stored prefixes save and cost: `python -m benchmarks.prefix_resume`. Two tables, then one line of JSON.

First a stateless chat that grows, on pulse-books: the time to the first token of each turn, with and without.
Then the parts by length of the prompt: looking a prefix up among those of 64 chats, and writing one.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import torch

from benchmarks.measured_model import MEASURED_MODEL
from nsm_core.config import EngineConfig
from nsm_core.model.loader import load_checkpoint
from nsm_lab.provenance import source_commit
from service.app import create_app
from service.backends.local import LocalBackend
from service.deps import Arrival, Services
from service.generate.chat import open_chat
from service.schemas.chat import ChatBody
from service.settings import Settings
from service.stores.prefixes.base import PrefixBounds, PrefixStore
from service.stores.prefixes.entry import decode_entry, encode_entry
from service.stores.prefixes.keys import PromptDigests
from service.stores.prefixes.memory import MemoryPrefixStore
from service.stores.prefixes.redis import RedisPrefixStore
from service.stores.redis.url import parse_redis_url
from service.stores.sessions.sqlite import SqliteSessionStore

BOUNDS = PrefixBounds(max_bytes=2**29, ttl_s=3600.0)
SYSTEM = "The old house stood at the end of the lane, and nobody had lived in it for thirty years or more. " * 40
QUESTION = (
    "Number {turn}: and who, of all the people that you have met in this town, would go there with me at night? " * 3
)
REPLY_TOKENS = 48
PROMPT_LENGTHS = (1_000, 10_000, 100_000)
NUM_CHATS = 64


@contextlib.asynccontextmanager
async def opened(kind: str, directory: Path) -> AsyncIterator[PrefixStore]:
    """An empty store of one kind."""
    if kind == "memory":
        yield MemoryPrefixStore(BOUNDS)
    else:
        words = ("--bind", "127.0.0.1", "--port", "16379", "--dir", str(directory), "--save", "")
        server = await asyncio.create_subprocess_exec("redis-server", *words, stdout=asyncio.subprocess.DEVNULL)
        await asyncio.sleep(1.0)
        yield RedisPrefixStore(parse_redis_url("redis://127.0.0.1:16379"), BOUNDS)
        server.terminate()
        await server.wait()


async def chat(services: Services, *, num_turns: int) -> list[dict[str, float]]:
    """Milliseconds to the first text of each turn: on the clock, and of this process's processors."""
    messages, rows = [{"role": "system", "content": SYSTEM}], []
    for turn in range(num_turns):
        messages.append({"role": "user", "content": QUESTION.format(turn=turn)})
        fields = {"max_tokens": REPLY_TOKENS, "seed": turn, "stream": True, "stream_options": {"include_usage": True}}
        body = ChatBody.model_validate({"messages": messages, **fields})
        wall, cpu, text = time.perf_counter(), time.process_time(), ""
        answer = await open_chat(services, "default", body, Arrival(request_id="benchmark", time=time.monotonic()))
        async for frames in answer.frames():
            for line in frames.splitlines()[::2]:
                chunk = json.loads(line.removeprefix(b"data: "))
                piece = chunk["choices"][0]["delta"].get("content", "") if chunk["choices"] else ""
                if piece and not text:
                    first = (time.perf_counter() - wall, time.process_time() - cpu)
                text += piece
        answer.leave()
        await services.prefix_resume.drain()
        usage = chunk["usage"]
        computed = usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"]
        rows.append(
            {"prompt_tokens": usage["prompt_tokens"], "computed": computed}
            | {"wall_ms": round(first[0] * 1000, 1), "cpu_ms": round(first[1] * 1000, 1)}
        )
        messages.append({"role": "assistant", "content": text})
    return rows


async def measure_chat(kind: str, backend: LocalBackend, *, num_turns: int) -> list[dict[str, float]]:
    settings = Settings(data_dir=Path("unused"), store="memory", prefix_cache_mb=0 if kind == "off" else 512)
    with tempfile.TemporaryDirectory() as directory:
        async with opened("memory" if kind == "off" else kind, Path(directory)) as store:
            app = create_app(settings, backend, SqliteSessionStore(None), store)
            async with app.router.lifespan_context(app):
                return await chat(app.state.services, num_turns=num_turns)


async def timed(work: Callable[[], Awaitable[object]], *, repeats: int = 10) -> float:
    """Milliseconds, the median."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        await work()
        times.append((time.perf_counter() - start) * 1000)
    return round(statistics.median(times), 2)


async def measure_parts(kind: str, backend: LocalBackend, prompt_len: int) -> dict[str, float | str]:
    """Milliseconds: the digests and the lookup, fetching and checking the entry, making and writing it."""
    model, tokenizer = backend.model, backend.tokenizer
    ids = tuple(index * 31 % 8191 + 1 for index in range(prompt_len))
    digests = PromptDigests(tenant="a", model=model, ids=ids)
    key, raw_ids = digests.key(prompt_len - 10), digests.raw[: 4 * (prompt_len - 10)]
    state = bytes(model.state_bytes)
    numbers = itertools.count(64)

    def entry() -> bytes:
        return encode_entry(
            tenant="a", key=key, raw_ids=raw_ids, state=state, model=model, tokenizer=tokenizer, created_at=0.0
        )

    async def lookup() -> None:
        here = PromptDigests(tenant="a", model=model, ids=ids)
        if here.longest(await store.find(tenant="a", family=here.family), limit=prompt_len - 1) != key:
            raise RuntimeError("the benchmark lost its entry")

    async def fetch() -> None:
        raw = await store.load(tenant="a", key=key) or b""
        decode_entry(raw, tenant="a", key=key, raw_ids=raw_ids, model=model, tokenizer=tokenizer)

    async def write() -> None:
        await store.put(tenant="a", key=digests.key(next(numbers)), entry=entry())

    with tempfile.TemporaryDirectory() as directory:
        async with opened(kind, Path(directory)) as store:
            await store.open()
            for _ in range(NUM_CHATS):
                await store.put(tenant="a", key=digests.key(next(numbers)), entry=bytes(64))
            await store.put(tenant="a", key=key, entry=entry())
            times = {"look_up_ms": await timed(lookup), "fetch_ms": await timed(fetch), "write_ms": await timed(write)}
            await store.close()
    return {"store": kind, "prompt_tokens": prompt_len, "entry_bytes": len(entry()), **times}


def show(rows: list[dict[str, float | str]]) -> None:
    print("".join(f"{name:>16}" for name in rows[0]))
    for row in rows:
        print("".join(f"{value:>16}" for value in row.values()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=8)
    args = parser.parse_args()
    torch.set_num_threads(1)
    kinds = ["memory", *(["redis"] if shutil.which("redis-server") else [])]
    loaded = load_checkpoint(MEASURED_MODEL)
    engine = EngineConfig()
    chats: list[dict[str, float | str]] = []
    for kind in ("off", *kinds):
        rows = asyncio.run(measure_chat(kind, LocalBackend(loaded, engine), num_turns=args.turns))
        chats += [{"store": kind, "turn": turn, **row} for turn, row in enumerate(rows, start=1)]
    show(chats)
    backend = LocalBackend(loaded, engine)
    parts = [asyncio.run(measure_parts(kind, backend, length)) for kind in kinds for length in PROMPT_LENGTHS]
    show(parts)
    fields = {"benchmark": "prefix_resume", "commit": source_commit(), "numerics": loaded.numerics}
    fields |= {"device": platform.machine(), "num_cores": os.cpu_count(), "model": loaded.name}
    print(json.dumps({**fields, "chats": chats, "parts": parts}))


if __name__ == "__main__":
    main()
