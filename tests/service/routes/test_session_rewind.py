"""Going back, on a fake backend for what is stored and on a real engine for what is sampled."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from nsm_core.state.snapshot import Snapshot
from service.stores.sessions.base import LogMark
from service.stores.sessions.key import SessionKey
from tests.support.backends import MakeBackend
from tests.support.fakes import FakeBackend, state_after
from tests.support.gateway import Gateway, error_of, gateway
from tests.support.stored_rows import put_snapshot

KEY = SessionKey("default", "s1")
EOT = 0


def ok(response: httpx.Response) -> dict[str, Any]:
    assert response.status_code == 200, response.text
    return dict(response.json())


async def create(server: Gateway, session_id: str = "s1") -> None:
    ok(await server.client.post("/v1/sessions", json={"id": session_id}))


async def say(server: Gateway, *ids: int, session_id: str = "s1", **body: Any) -> dict[str, Any]:
    body = {"input": list(ids), "max_tokens": 4, **body}
    return ok(await server.client.post(f"/v1/sessions/{session_id}/generate", json=body))


async def rewind(server: Gateway, session_id: str = "s1", **body: Any) -> httpx.Response:
    return await server.client.post(f"/v1/sessions/{session_id}/rewind", json=body)


async def log_of(server: Gateway) -> tuple[int, ...]:
    return await server.services.store.read_log(KEY)


async def snapshot_of(server: Gateway) -> Snapshot:
    stored = await server.services.store.load(KEY)
    assert stored.snapshot is not None
    return Snapshot.decode(stored.snapshot)


async def three_turns(server: Gateway) -> tuple[int, ...]:
    """Logs of 6, 12 and 18 tokens: two read and four sampled in each turn. Returns the log."""
    await create(server)
    for seed in (1, 2, 3):
        await say(server, 5, 6, seed=seed)
    log = await log_of(server)
    assert len(log) == 18
    return log


@pytest.mark.parametrize("num_tokens", [18, 17, 13, 12, 7, 6, 3, 2])
async def test_a_session_goes_back_to_any_token_of_its_log(num_tokens: int) -> None:
    async with gateway(FakeBackend()) as server:
        log = await three_turns(server)
        session = ok(await rewind(server, to_position=num_tokens))
        assert (session["version"], session["position"]) == (4, num_tokens - 1)
        assert await log_of(server) == log[:num_tokens]
        snapshot = await snapshot_of(server)
        assert snapshot.state == state_after(log[: num_tokens - 1])
        assert (snapshot.header.pending_id, snapshot.header.position) == (log[num_tokens - 1], num_tokens - 1)
        assert (snapshot.header.version, snapshot.header.parent) == (4, 3)
        sampled = [token for position, token in enumerate(log[:num_tokens]) if position % 6 >= 2]
        assert dict(snapshot.header.sampler.generated_counts) == {token: sampled.count(token) for token in sampled}
        assert snapshot.header.sampler.seed == (num_tokens + 5) // 6
        again = await say(server, 9)
        assert await log_of(server) == (*log[:num_tokens], 9, *server.services.backend.script_ids[:4])
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == num_tokens - 1


async def test_the_counts_of_a_place_inside_a_turn_survive_a_second_loss() -> None:
    async with gateway(FakeBackend()) as server:
        await three_turns(server)
        ok(await rewind(server, to_position=10))
        counts = (await snapshot_of(server)).header.sampler.generated_counts
        assert (await server.services.store.log_marks(KEY))[-1] == LogMark(
            version=4, num_log_tokens=10, num_sampled=2, seed=2
        )
        await put_snapshot(server.store, None)
        assert (await say(server, 9, max_tokens=1))["session"]["rebuilt"] == "missing"
        first = server.services.backend.script_ids[0]
        expected = {**counts, first: counts[first] + 1}
        assert (await snapshot_of(server)).header.sampler.generated_counts == expected


@pytest.mark.parametrize(("to_version", "num_tokens"), [(1, 6), (2, 12), (3, 18)])
async def test_a_session_goes_back_to_the_end_of_a_turn(to_version: int, num_tokens: int) -> None:
    async with gateway(FakeBackend()) as server:
        log = await three_turns(server)
        session = ok(await rewind(server, to_version=to_version, expected_version=3))
        assert (session["version"], session["position"]) == (4, num_tokens - 1)
        assert await log_of(server) == log[:num_tokens]
        assert ok(await rewind(server, to_version=4))["position"] == num_tokens - 1  # a rewind is a version too
        assert ok(await rewind(server, to_version=1))["position"] == 5


@pytest.mark.parametrize("target", [{"to_version": 0}, {"to_position": 0}])
async def test_a_session_goes_back_to_the_very_start(target: dict[str, int]) -> None:
    async with gateway(FakeBackend()) as server:
        await three_turns(server)
        session = ok(await rewind(server, **target))
        assert (session["version"], session["position"], session["snapshot_bytes"]) == (4, 0, 0)
        assert await log_of(server) == ()
        await say(server, input="It")
        assert (await log_of(server))[0] == EOT
        assert server.services.backend.requests[-1].resume is None


async def test_a_log_of_one_token_is_fed_and_needs_more_input() -> None:
    async with gateway(FakeBackend()) as server:
        log = await three_turns(server)
        assert ok(await rewind(server, to_position=1))["position"] == 1
        assert (await snapshot_of(server)).state == state_after(log[:1])
        response = await server.client.post("/v1/sessions/s1/generate", json={})
        assert (response.status_code, error_of(response)["param"]) == (400, "input")


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({}, "to_version", "exactly one"),
        ({"to_version": 1, "to_position": 3}, "to_version", "exactly one"),
        ({"to_version": 7}, "to_version", "the last are 0, 1, 2, 3"),
        ({"to_version": -1}, "to_version", "got -1"),
        ({"to_position": 19}, "to_position", "must be in [0, 18], got 19"),
        ({"to_position": -1}, "to_position", "got -1"),
        ({"to_position": "3"}, "to_position", "integer"),
    ],
    ids=str,
)
async def test_a_place_that_is_not_there_is_refused(body: dict[str, Any], param: str, says: str) -> None:
    async with gateway(FakeBackend()) as server:
        log = await three_turns(server)
        response = await rewind(server, **body)
        assert (response.status_code, error_of(response)["param"]) == (400, param)
        assert says in error_of(response)["message"]
        assert await log_of(server) == log
        assert (await say(server, 9))["session"]["version"] == 4


async def test_a_version_that_was_cut_off_cannot_be_reached_any_more() -> None:
    async with gateway(FakeBackend()) as server:
        await three_turns(server)
        ok(await rewind(server, to_position=8))
        response = await rewind(server, to_version=2)
        assert "the last are 0, 1, 4" in error_of(response)["message"]


async def test_the_expected_version_must_be_the_heads_and_the_session_must_exist() -> None:
    async with gateway(FakeBackend()) as server:
        await three_turns(server)
        response = await rewind(server, to_version=1, expected_version=2)
        assert (response.status_code, error_of(response)["code"]) == (409, "version_conflict")
        assert error_of(response)["param"] == "expected_version"
        response = await rewind(server, "nobody", to_version=1)
        assert (response.status_code, error_of(response)["code"]) == (404, "session_not_found")


async def test_P5_a_rewind_and_a_turn_exclude_each_other_and_a_cancel_stops_it() -> None:
    async with gateway(FakeBackend(hold=True)) as server:
        backend = server.services.backend
        await create(server)
        for _ in range(2):  # the second moves the state past the place to go back to, which must be read again
            backend.release(4)
            await say(server, 5, 6)
        rewinding = asyncio.create_task(rewind(server, to_version=1))
        is_reading = asyncio.create_task(backend.held.wait())
        await asyncio.wait((rewinding, is_reading), return_when=asyncio.FIRST_COMPLETED)
        assert not rewinding.done(), "nothing had to be read"
        for response in (
            await rewind(server, to_version=1),
            await server.client.post("/v1/sessions/s1/generate", json={"input": "x"}),
        ):
            assert (response.status_code, error_of(response)["code"]) == (409, "session_busy")
        assert ok(await server.client.post("/v1/sessions/s1/cancel"))["cancelled"]
        response = await rewinding
        assert (response.status_code, error_of(response)["code"]) == (409, "turn_cancelled")
        backend.forget_permits()
        backend.release(10)
        assert (await say(server, 9))["session"]["version"] == 3


async def test_a_cancel_that_comes_too_late_for_a_rewind_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    async with gateway(FakeBackend()) as server:
        await three_turns(server)
        store, is_writing, may_write = server.services.store, asyncio.Event(), asyncio.Event()
        write = store.rewind

        async def slow(*lease: Any, **fields: Any) -> Any:
            is_writing.set()
            await may_write.wait()
            return await write(*lease, **fields)

        monkeypatch.setattr(store, "rewind", slow)
        rewinding = asyncio.create_task(rewind(server, to_version=1))
        await is_writing.wait()
        cancelling = asyncio.create_task(server.client.post("/v1/sessions/s1/cancel"))
        turn = server.services.turns._running["default", "s1"]
        while turn._stop_error is None:  # noqa: ASYNC110 - it tells nobody that it is to stop
            await asyncio.sleep(0)
        may_write.set()
        assert not ok(await cancelling)["cancelled"]
        assert ok(await rewinding)["version"] == 4


async def test_a_reading_that_fails_leaves_the_session_as_it_was() -> None:
    async with gateway(FakeBackend()) as server:
        log = await three_turns(server)
        server.services.backend.fail_after = 0
        response = await rewind(server, to_version=1)
        assert (response.status_code, error_of(response)["message"]) == (500, "the fake was told to fail")
        server.services.backend.fail_after = None
        assert await log_of(server) == log
        assert (await say(server, 9))["session"]["version"] == 4


SAMPLED = {"temperature": 1.0, "repetition_penalty": 1.5, "ignore_eos": True, "max_tokens": 12}


async def test_what_comes_after_a_rewind_is_what_came_the_first_time(make_backend: MakeBackend) -> None:
    async with gateway(make_backend()) as server:
        await create(server)
        first = await say(server, 40, 41, seed=7, **SAMPLED)
        texts = [first["choices"][0]["text"]]
        for ids in ((50,), (60, 61)):
            texts.append((await say(server, *ids, **SAMPLED))["choices"][0]["text"])
        log = await log_of(server)
        ok(await rewind(server, to_version=1))
        assert (await say(server, 50, **SAMPLED))["choices"][0]["text"] == texts[1]
        assert (await say(server, 60, 61, **SAMPLED))["choices"][0]["text"] == texts[2]
        assert await log_of(server) == log
        for position in (3, 8, len(log) - 5):  # in the middle of a sampled text: it goes on as it did
            end = next(mark.num_log_tokens for mark in await server.services.store.log_marks(KEY)
                       if mark.num_log_tokens > position)  # fmt: skip
            ok(await rewind(server, to_position=position))
            await say(server, **{**SAMPLED, "max_tokens": end - position})
            assert await log_of(server) == log[:end]
            ok(await rewind(server, to_version=0))
            await say(server, 40, 41, seed=7, **SAMPLED)
            await say(server, 50, **SAMPLED)
            await say(server, 60, 61, **SAMPLED)
            assert await log_of(server) == log
