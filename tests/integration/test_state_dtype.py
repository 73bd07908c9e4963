"""Sessions whose states are rounded when they are stored, over HTTP, on models of every kind of layer.

What is promised: what was stored is what every replica goes on from, to the same text, whatever it rounds to itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from nsm_core.engine.engine import Engine, Events
from nsm_core.state.quantize import FORMATS, StateFormat
from nsm_core.state.snapshot import Snapshot
from nsm_core.tokenizer import Tokenizer
from service.backends.local import LocalBackend
from service.stores.redis.url import parse_redis_url
from service.stores.sessions.base import SessionStore
from service.stores.sessions.key import SessionKey
from service.stores.sessions.redis import RedisSessionStore
from service.stores.sessions.sqlite import SqliteSessionStore
from service.transfer.backup import all_sessions, backup, restore
from service.transfer.verify import Verified, verify
from tests.service.stores.prefixes.test_resume import Unreliable
from tests.support.counts import every_second
from tests.support.gateway import FILE_HEADERS, Gateway, gateway
from tests.support.models import local_backend
from tests.support.stored_rows import put_snapshot

KEY = SessionKey("default", "s1")
PATTERNS = {"slots": "N", "hybrid": "NW", "transformer": "A"}
DTYPES = [form.value for form in StateFormat]
NUM_STEPS = 60  # half of a turn that is lost
LONG = list(range(1, 301))  # a turn that is worth an older snapshot
OpenStore = Callable[[], SessionStore]


def make_backend(tokenizer: Tokenizer, pattern: str = "N") -> LocalBackend:
    # one row a step: neighbours would change the last bits
    limits = {"max_slots": 1, "token_budget": 64}
    return local_backend(tokenizer, fingerprint=f"random-{pattern}", pattern=pattern, **limits)


@pytest.fixture(params=["sqlite", pytest.param("redis", marks=pytest.mark.redis)])
def open_store(request: pytest.FixtureRequest, tmp_path: Path) -> OpenStore:
    """Each call is another replica's way to the same sessions."""
    if request.param == "sqlite":
        return lambda: SqliteSessionStore(tmp_path / "sessions.db")
    url = request.getfixturevalue("redis_single").own_url()
    return lambda: RedisSessionStore(parse_redis_url(url))


def ok(response: httpx.Response) -> dict[str, Any]:
    assert response.status_code == 200, response.text
    return dict(response.json())


async def create(server: Gateway, session_id: str = "s1") -> None:
    ok(await server.client.post("/v1/sessions", json={"id": session_id}))


async def say(server: Gateway, ids: list[int], session_id: str = "s1", **fields: Any) -> str:
    body = {"input": ids, "max_tokens": 8, "temperature": 1.0, **fields}
    answer = ok(await server.client.post(f"/v1/sessions/{session_id}/generate", json=body))
    return str(answer["choices"][0]["text"])


async def raw_of(store: SessionStore, session_id: str = "s1") -> bytes:
    stored = await store.load(SessionKey("default", session_id))
    assert stored.snapshot is not None
    return stored.snapshot


async def written(store: SessionStore, identity: str) -> None:
    """Until some of the turn's tokens are in its record."""
    while True:
        record = await store.get_turn(KEY, identity=identity)
        if record is not None and record.chunks:
            return
        await asyncio.sleep(0.005)


async def verified_by(server: Gateway) -> list[Verified]:
    store = server.services.store
    return [found async for found in verify(store, server.services.backend, await all_sessions(store))]


@contextlib.asynccontextmanager
async def replica(
    tokenizer: Tokenizer, store: SessionStore | None, dtype: str, pattern: str = "N", **settings: Any
) -> AsyncIterator[Gateway]:
    async with gateway(make_backend(tokenizer, pattern), store=store, state_dtype=dtype, **settings) as server:
        yield server


@pytest.mark.parametrize(
    ("dtype", "pattern"),
    [
        pytest.param(dtype, pattern, id=f"{dtype}-{name}")
        for row, dtype in enumerate(DTYPES)
        for column, (name, pattern) in enumerate(PATTERNS.items())
        if every_second(row, column)
    ],
)
async def test_P4_turns_on_two_replicas_are_those_of_one(
    tiny_tokenizer: Tokenizer, open_store: OpenStore, dtype: str, pattern: str
) -> None:
    async with replica(tiny_tokenizer, None, dtype, pattern) as one:
        await create(one)
        texts = [await say(one, [5, 6, turn], seed=7) for turn in range(4)]
        states = await raw_of(one.services.store)
    async with (
        replica(tiny_tokenizer, open_store(), dtype, pattern) as first,
        replica(tiny_tokenizer, open_store(), dtype, pattern) as second,
    ):
        await create(first)
        assert [await say((first, second)[turn % 2], [5, 6, turn], seed=7) for turn in range(4)] == texts
        raw, head = await raw_of(first.services.store), await first.services.store.get(KEY)
        snapshot = Snapshot.decode(raw)
        assert snapshot.header.stored_format.value == snapshot.header.rounding.value == dtype
        assert snapshot.state == Snapshot.decode(states).state
        assert head.snapshot_bytes == len(raw)
        body = ok(await second.client.get("/v1/sessions/s1/states"))
        assert (FORMATS[body["dtype"]], FORMATS[body["rounded_to"]]) == (dtype, dtype)
        (found,) = await verified_by(second)
        assert (found.divergences, found.rounding) == ((), dtype)


@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
async def test_a_rounded_state_takes_the_bytes_of_its_dtype_in_the_tenants_share(
    tiny_tokenizer: Tokenizer, pattern: str
) -> None:
    sizes = {}
    for dtype in DTYPES:
        async with replica(tiny_tokenizer, None, dtype, pattern) as server:
            await create(server)
            await say(server, [5, 6])
            await say(server, [7])
            store, raw = server.services.store, await raw_of(server.services.store)
            sizes[dtype] = len(raw) - (len(Snapshot.decode(raw).header.to_json()) + 40)  # prefix and checksum
            full = server.services.backend.model.state_bytes
            usage = await store.usage(tenant="default")
            results = usage.num_bytes - len(raw) - 4 * (await store.get(KEY)).num_log_tokens
            assert 0 < results < 4_000
            body = ok(await server.client.get("/v1/models"))["data"][0]
            assert body["state_dtype"] == dtype
            assert body["system_fingerprint"].endswith("test" if dtype == "fp32" else f"test_{dtype}")
    assert sizes["fp32"] == full
    assert sizes["fp16"] == full // 2 + 4  # the position stays as it is
    assert sizes["int8"] < 0.33 * full


async def test_a_fleet_that_rounds_in_different_ways_goes_on_from_what_is_stored(tiny_tokenizer: Tokenizer) -> None:
    store = SqliteSessionStore(None)
    async with contextlib.AsyncExitStack() as stack:
        servers = {
            dtype: await stack.enter_async_context(replica(tiny_tokenizer, store, dtype, "NW")) for dtype in DTYPES
        }
        await create(servers["int8"])
        await say(servers["int8"], [5, 6], seed=3)
        for dtype, server in servers.items():
            ok(await server.client.post("/v1/sessions/s1/fork", json={"id": dtype}))
            assert Snapshot.decode(await raw_of(store, dtype)).state == Snapshot.decode(await raw_of(store)).state
        assert len({await say(server, [9], dtype) for dtype, server in servers.items()}) == 1
        for dtype in DTYPES:
            header = Snapshot.decode(await raw_of(store, dtype)).header
            assert (header.stored_format, header.rounding) == (dtype, "int8")
        assert all(not found.divergences for found in await verified_by(servers["fp32"]))


@pytest.fixture
def may_go_on(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """While it is clear, engines make NUM_STEPS steps and no more."""
    opened, step, num_steps = threading.Event(), Engine.step, 0

    def step_when_allowed(engine: Engine) -> Events:
        nonlocal num_steps
        if engine.has_work and not opened.is_set():
            num_steps += 1
            if num_steps > NUM_STEPS:
                opened.wait()
        return step(engine)

    opened.set()
    monkeypatch.setattr(Engine, "step", step_when_allowed)
    yield opened
    opened.set()


async def test_R14_a_turn_is_taken_over_from_the_state_that_it_began_with(
    tiny_tokenizer: Tokenizer, may_go_on: threading.Event
) -> None:
    store, body = (
        SqliteSessionStore(None),
        {"input": [9], "max_tokens": 2 * NUM_STEPS, "temperature": 1.0, "ignore_eos": True},
    )
    async with replica(tiny_tokenizer, store, "int8") as lost, replica(tiny_tokenizer, store, "fp32") as other:
        await create(lost)
        await say(lost, [5, 6], seed=3)
        ok(await lost.client.post("/v1/sessions/s1/fork", json={"id": "s2"}))
        unbroken = ok(await lost.client.post("/v1/sessions/s2/generate", json=body))
        turn = {"json": body, "headers": {"Idempotency-Key": "k"}}
        may_go_on.clear()
        running = asyncio.create_task(lost.client.post("/v1/sessions/s1/generate", **turn))
        await written(store, "key:k")
        for task in tuple(lost.services.turns._tasks):
            task.cancel()
        may_go_on.set()
        await running
        answer = await other.client.post("/v1/sessions/s1/generate", **turn)
        assert answer.headers["idempotent-replayed"] == "true"
        assert other.metric("nsm_turn_takeover_total") == 1
        assert ok(answer)["choices"] == unbroken["choices"]
        header = Snapshot.decode(await raw_of(store)).header
        assert (header.stored_format, header.rounding) == ("fp32", "int8")


async def test_what_is_read_from_the_start_of_its_log_is_exact_again(tiny_tokenizer: Tokenizer) -> None:
    store = SqliteSessionStore(None)
    async with replica(tiny_tokenizer, store, "int8") as lossy, replica(tiny_tokenizer, store, "fp32") as exact:
        await create(lossy)
        for turn in range(3):
            await say(lossy, [5, turn], seed=3)
        ok(await exact.client.post("/v1/sessions/s1/rewind", json={"to_version": 2}))
        header = Snapshot.decode(await raw_of(store)).header
        assert (header.stored_format, header.rounding) == ("fp32", "fp32")
        (found,) = await verified_by(exact)
        assert (found.verdict, found.rounding) == ("same", "fp32")


@pytest.mark.parametrize("dtype", DTYPES)
async def test_older_snapshots_keep_the_dtype_of_their_turn_and_a_rewind_says_where_it_began(
    tiny_tokenizer: Tokenizer, open_store: OpenStore, dtype: str
) -> None:
    async with replica(tiny_tokenizer, open_store(), dtype, retained_snapshots=8) as server:
        await create(server)
        states = []
        for turn in range(3):
            await say(server, LONG, seed=turn)
            states.append(Snapshot.decode(await raw_of(server.services.store)).state)
        store = server.services.store
        retained = await store.list_retained(KEY)
        assert [one.version for one in retained] == [1, 2]
        for one in retained:
            raw = await store.load_retained(KEY, version=one.version)
            assert raw is not None
            assert Snapshot.decode(raw).header.stored_format == dtype
            assert Snapshot.decode(raw).state == states[one.version - 1]
    async with replica(tiny_tokenizer, open_store(), "fp32", retained_snapshots=8) as other:
        ok(await other.client.post("/v1/sessions/s1/rewind", json={"to_position": retained[1].position + 5}))
        header = Snapshot.decode(await raw_of(other.services.store)).header
        assert (header.stored_format, header.rounding) == ("fp32", dtype)


@pytest.mark.parametrize("dtype", DTYPES)
async def test_a_file_and_a_backup_hold_the_state_as_it_was_rounded(
    tiny_tokenizer: Tokenizer, tmp_path: Path, dtype: str
) -> None:
    async with (
        replica(tiny_tokenizer, None, dtype, "NW") as server,
        replica(tiny_tokenizer, None, "fp32", "NW") as away,
    ):
        await create(server)
        await say(server, [5, 6], seed=3)
        raw = await raw_of(server.services.store)
        exported = await server.client.get("/v1/sessions/s1/export")
        ok(await away.client.post("/v1/sessions/import", content=exported.content, headers=FILE_HEADERS))
        assert await raw_of(away.services.store) == raw
        restored, store = SqliteSessionStore(None), server.store
        written = [result.outcome async for result in backup(store, await all_sessions(store), tmp_path / "backup")]
        with (tmp_path / "backup").open("rb") as file:
            assert [result.outcome async for result in restore(restored, file)] == written == ["written"]
        assert await raw_of(restored) == raw
        assert await say(away, [9]) == await say(server, [9])


async def test_a_file_of_another_model_is_rounded_as_the_server_rounds(tiny_tokenizer: Tokenizer) -> None:
    async with replica(tiny_tokenizer, None, "int8") as server, replica(tiny_tokenizer, None, "fp16", "NW") as away:
        await create(server)
        await say(server, [5, 6])
        exported = await server.client.get("/v1/sessions/s1/export")
        ok(await away.client.post("/v1/sessions/import?rebuild=true", content=exported.content, headers=FILE_HEADERS))
        header = Snapshot.decode(await raw_of(away.services.store)).header
        assert (header.stored_format, header.rounding) == ("fp16", "fp16")


@pytest.mark.parametrize("dtype", DTYPES)
async def test_R3_a_lost_state_is_made_again_and_rounded_once(tiny_tokenizer: Tokenizer, dtype: str) -> None:
    store = SqliteSessionStore(None)
    async with replica(tiny_tokenizer, store, dtype, state_cache_mb=0) as server:
        await create(server)
        for turn in range(3):
            await say(server, [5, turn], seed=3)
        await put_snapshot(store, b"damaged")
        answer = ok(await server.client.post("/v1/sessions/s1/generate", json={"input": [4], "max_tokens": 1}))
        assert answer["session"]["rebuilt"] == "corrupt"
        (found,) = await verified_by(server)
        assert (found.verdict, found.rounding) == ("same", dtype)
        assert found.difference < {"fp32": 2e-4, "fp16": 1e-3, "int8": 2e-2}[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
async def test_a_stored_beginning_is_the_same_before_and_after_it_is_written(
    tiny_tokenizer: Tokenizer, dtype: str
) -> None:
    prefixes = Unreliable()
    async with replica(tiny_tokenizer, None, dtype, "NW", prefixes=prefixes) as server:
        prompt = list(range(1, 101))
        body = {"prompt": [*prompt, 7, 8], "max_tokens": 8, "logprobs": 2, "temperature": 0.0}
        prefixes.gate.clear()
        ok(await server.client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1}))
        waiting = ok(await server.client.post("/v1/completions", json=body))
        prefixes.gate.set()
        await server.services.prefix_resume.drain()
        stored = ok(await server.client.post("/v1/completions", json=body))
        for answer in (waiting, stored):
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 100
        assert waiting["choices"] == stored["choices"]
