"""Live input: text that a session reads before anybody asks, and the way back."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from nsm_core.errors import StorageFull
from nsm_core.state.snapshot import Snapshot
from service.stores.sessions.base import Commit, SessionHead
from service.stores.sessions.key import SessionKey
from service.stores.sessions.lease import Lease
from service.stores.sessions.turn_records import TurnStart
from service.turns.codec import digest_of
from tests.support.backends import MakeBackend
from tests.support.fakes import FakeBackend, state_after, tiny_tokenizer
from tests.support.gateway import Gateway, error_of, gateway

KEY = SessionKey("default", "s1")
EOT = 0


@pytest.fixture
async def server() -> AsyncIterator[Gateway]:
    async with gateway(FakeBackend(), retained_snapshots=4) as made:
        await ask(made, "/v1/sessions", id="s1")
        yield made


async def post(server: Gateway, path: str, **body: Any) -> httpx.Response:
    return await server.client.post(path, json=body)


async def ask(server: Gateway, path: str, **body: Any) -> dict[str, Any]:
    response = await post(server, path, **body)
    assert response.status_code == 200, response.text
    return dict(response.json())


async def append(server: Gateway, given: Any, **body: Any) -> dict[str, Any]:
    return await ask(server, "/v1/sessions/s1/append", input=given, **body)


async def state_of(server: Gateway) -> bytes:
    stored = await server.services.store.load(KEY)
    assert stored.snapshot is not None
    return Snapshot.decode(stored.snapshot).state


async def test_appended_text_is_read_and_committed_without_a_sampled_token(server: Gateway) -> None:
    first = await append(server, "It was ")
    num_tokens = 1 + len(tiny_tokenizer().encode("It was "))
    assert (first["version"], first["position"], first["mark"], first["num_appended"]) == (1, num_tokens, 0, num_tokens)
    second = await append(server, [5, 6, 7])
    assert (second["version"], second["mark"], second["num_appended"]) == (2, 1, 3)
    log = await server.services.store.read_log(KEY)
    assert log == (EOT, *tiny_tokenizer().encode("It was "), 5, 6, 7)
    assert await state_of(server) == state_after(log)
    assert [mark.num_sampled for mark in await server.services.store.log_marks(KEY)] == [0, 0]


async def test_a_turn_after_appends_reads_only_its_own_input(server: Gateway) -> None:
    appended = await append(server, [5, 6, 7])
    turn = await ask(server, "/v1/sessions/s1/generate", input=[8], max_tokens=3)
    assert turn["usage"]["prompt_tokens_details"]["cached_tokens"] == appended["position"]
    after = await append(server, [9])
    assert after["num_appended"] == 1  # the pending token of the turn is read with it, and was in the log
    log = await server.services.store.read_log(KEY)
    assert await state_of(server) == state_after(log)


async def test_an_append_commits_its_tokens_and_leaves_the_state_to_a_later_snapshot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So it succeeds on a full disk that has room for tokens but none for a state."""
    backend = FakeBackend(replays_exactly=True)
    async with gateway(backend) as server:
        await ask(server, "/v1/sessions", id="s1")
        commit = server.store.commit

        async def commit_without_room_for_states(lease: Lease, given: Commit) -> SessionHead:
            if given.snapshot is not None:
                raise StorageFull("no room for a state")
            return await commit(lease, given)

        monkeypatch.setattr(server.store, "commit", commit_without_room_for_states)
        await append(server, [5, 6, 7])
        await append(server, [8, 9])
        await ask(server, "/v1/sessions/s1/generate", input=[11], max_tokens=1)
    assert [request.prompt_ids for request in backend.requests] == [(5, 6, 7), (8, 9), (11,)]  # nothing twice


@pytest.mark.parametrize("body", [{}, {"input": None}], ids=str)
async def test_append_without_input_is_refused(server: Gateway, body: dict[str, Any]) -> None:
    refused = await post(server, "/v1/sessions/s1/append", **body)
    assert refused.status_code == 400
    assert (error_of(refused)["param"], error_of(refused)["message"]) == ("input", "input is required")


async def test_an_empty_append_reads_a_token_that_waits(server: Gateway) -> None:
    refused = await post(server, "/v1/sessions/s1/append", input="")
    assert (refused.status_code, error_of(refused)["param"]) == (400, "input")
    await ask(server, "/v1/sessions/s1/generate", input=[5], max_tokens=3)
    warmed = await append(server, "")
    assert (warmed["num_appended"], warmed["position"]) == (0, len(await server.services.store.read_log(KEY)))
    again = await post(server, "/v1/sessions/s1/append", input="")
    assert (again.status_code, error_of(again)["param"]) == (400, "input")


async def test_clear_returns_to_a_mark(server: Gateway) -> None:
    await append(server, [5, 6, 7])
    mark = (await append(server, [8, 9]))["mark"]
    await append(server, [10])
    cleared = await ask(server, "/v1/sessions/s1/clear", mark=mark)
    assert cleared["version"] == 4
    assert await server.services.store.read_log(KEY) == (5, 6, 7)
    await append(server, [11])
    assert await state_of(server) == state_after((5, 6, 7, 11))
    missing = await post(server, "/v1/sessions/s1/clear", mark=99)
    assert (missing.status_code, error_of(missing)["param"]) == (400, "mark")
    everything = await ask(server, "/v1/sessions/s1/clear", mark=0)
    assert everything["position"] == 0


async def test_a_retry_with_the_expected_version_reads_nothing_twice(server: Gateway) -> None:
    await append(server, [5], expected_version=0)
    again = await post(server, "/v1/sessions/s1/append", input=[5], expected_version=0)
    assert (again.status_code, error_of(again)["code"]) == (409, "version_conflict")
    assert await server.services.store.read_log(KEY) == (5,)


async def append_as(server: Gateway, key: str, given: Any, **body: Any) -> httpx.Response:
    headers = {"Idempotency-Key": key}
    return await server.client.post("/v1/sessions/s1/append", json={"input": given, **body}, headers=headers)


async def test_a_retry_with_the_same_key_gets_the_first_answer_and_reads_nothing(server: Gateway) -> None:
    first = await append_as(server, "k", [5, 6], expected_version=0)
    assert "idempotent-replayed" not in first.headers
    await append(server, [7])
    again = await append_as(server, "k", [5, 6], expected_version=0)
    assert (again.status_code, again.headers["idempotent-replayed"]) == (200, "true")
    shown = ("version", "position", "mark", "num_appended")
    assert [again.json()[name] for name in shown] == [first.json()[name] for name in shown] == [1, 2, 0, 2]
    assert await server.services.store.read_log(KEY) == (5, 6, 7)
    other = await append_as(server, "k2", [5, 6])
    assert other.json()["version"] == 3


async def test_a_key_of_another_request_is_refused(server: Gateway) -> None:
    await append_as(server, "k", [5])
    reused = await append_as(server, "k", [6])
    assert (reused.status_code, error_of(reused)["code"]) == (422, "idempotency_key_reused")
    turn = await server.client.post(
        "/v1/sessions/s1/generate", json={"input": [5], "max_tokens": 2}, headers={"Idempotency-Key": "k"}
    )
    assert (turn.status_code, error_of(turn)["code"]) == (422, "idempotency_key_reused")
    bad = await append_as(server, "with space", [6])
    assert (bad.status_code, error_of(bad)["param"]) == (400, "Idempotency-Key")
    assert await server.services.store.read_log(KEY) == (5,)


async def test_a_refused_append_leaves_its_key_free(server: Gateway) -> None:
    refused = await append_as(server, "k", "")
    assert refused.status_code == 400
    assert (await append_as(server, "k", [5])).json()["version"] == 1


async def test_an_append_whose_server_was_lost_is_done_by_the_retry(server: Gateway) -> None:
    store, digest = server.services.store, digest_of({"append": {"input": [5, 6], "expected_version": None}})
    leased = await store.acquire(KEY, holder="lost", lease_s=30.0)
    names = {"turn_id": "append-1", "identity": "key:k", "digest": digest, "model_fingerprint": "fake-fingerprint"}
    start = TurnStart(**names, base_version=None, request=b"{}")
    await store.begin_turn(leased.lease, start, max_records=16)
    await store.release(leased.lease)
    done = await append_as(server, "k", [5, 6])
    assert (done.status_code, done.json()["version"]) == (200, 1)
    again = await append_as(server, "k", [5, 6])
    assert again.headers["idempotent-replayed"] == "true"
    assert await store.read_log(KEY) == (5, 6)


async def test_R3_an_abandoned_turn_outlives_an_append_that_is_refused(server: Gateway) -> None:
    store = server.services.store
    names = {"turn_id": "lost", "identity": "key:lost", "digest": "d", "model_fingerprint": "fake-fingerprint"}
    leased = await store.acquire(
        KEY, holder="lost", lease_s=30.0, start=TurnStart(**names, base_version=0, request=b"")
    )
    await store.release(leased.lease)
    assert (await append_as(server, "k", "")).status_code == 400
    record = await store.get_turn(KEY, turn_id="lost")
    assert record is not None
    assert record.status == "running"
    assert (await append_as(server, "k", [5, 6])).json()["version"] == 1
    record = await store.get_turn(KEY, turn_id="lost")
    assert record is not None
    assert record.status == "failed"
    again = await append_as(server, "k", [5, 6])
    assert again.headers["idempotent-replayed"] == "true"


async def test_penalties_do_not_count_what_was_appended(server: Gateway) -> None:
    await append(server, [5, 6])
    await ask(server, "/v1/sessions/s1/generate", input=[7], max_tokens=3)
    stored = await server.services.store.load(KEY)
    assert stored.snapshot is not None
    counts = Snapshot.decode(stored.snapshot).header.sampler.generated_counts
    await append(server, [8, 9])
    stored = await server.services.store.load(KEY)
    assert stored.snapshot is not None
    assert Snapshot.decode(stored.snapshot).header.sampler.generated_counts == counts


async def test_appends_in_pieces_give_the_answer_of_one_input(make_backend: MakeBackend) -> None:
    async with gateway(make_backend()) as server:
        answers = []
        for name, pieces in (("whole", []), ("pieces", [[0, 5, 6], [7], [8, 9, 10, 11]])):
            await ask(server, "/v1/sessions", id=name)
            for piece in pieces:
                await ask(server, f"/v1/sessions/{name}/append", input=piece)
            rest = [0, 5, 6, 7, 8, 9, 10, 11, 12][sum(map(len, pieces)) :]
            turn = await ask(server, f"/v1/sessions/{name}/generate", input=rest, max_tokens=8, seed=3)
            answers.append(turn["choices"][0]["text"])
        assert answers[0] == answers[1]
