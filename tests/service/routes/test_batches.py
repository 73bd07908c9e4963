"""/v1/batches with the stock client: files of requests, run beside live ones."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types import Batch

from service.batches.library import BatchLibrary
from service.stores.sessions.sqlite import SqliteSessionStore
from tests.support.backends import MakeBackend
from tests.support.batches import input_of, lines_of
from tests.support.fakes import FakeBackend
from tests.support.gateway import Gateway, error_of, gateway, until
from tests.support.tenants import make_key, write_keys

ENDED = ("completed", "failed", "expired", "cancelled")
BODY = {"prompt": "Hi", "max_tokens": 4}
BODIES: dict[str, Any] = {  # by endpoint
    "/v1/embeddings": {"input": "Hi"},
    "/v1/completions": BODY,
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4},
    "/v1/responses": {"input": "Hi"},
}


@pytest.fixture
async def server() -> AsyncIterator[Gateway]:
    async with gateway(FakeBackend(), is_live=True) as made:
        yield made


async def begin(server: Gateway, raw: bytes, *, endpoint: Any = "/v1/completions", **fields: Any) -> Batch:
    file = await server.openai.files.create(file=("in.jsonl", raw), purpose="batch")
    return await server.openai.batches.create(
        input_file_id=file.id, endpoint=endpoint, completion_window="24h", **fields
    )


async def ended(server: Gateway, batch: Batch) -> Batch:
    while batch.status not in ENDED:
        await asyncio.sleep(0.02)
        batch = await server.openai.batches.retrieve(batch.id)
    return batch


async def content(server: Gateway, file_id: str | None) -> dict[str, dict[str, Any]]:
    if file_id is None:
        return {}
    return lines_of((await server.openai.files.content(file_id)).content)


async def test_each_line_is_answered_as_its_endpoint_answers(server: Gateway) -> None:
    for endpoint, body in BODIES.items():
        made = await begin(server, input_of(*[body] * 3, url=endpoint), endpoint=endpoint, metadata={"a": "b"})
        batch = await ended(server, made)
        assert (batch.status, batch.metadata, batch.errors) == ("completed", {"a": "b"}, None)
        assert batch.request_counts is not None
        assert batch.request_counts.to_dict() == {"total": 3, "completed": 3, "failed": 0}
        assert None not in (batch.in_progress_at, batch.finalizing_at, batch.completed_at, batch.expires_at)
        assert batch.error_file_id is None
        output = await content(server, batch.output_file_id)
        assert list(output) == ["line-0", "line-1", "line-2"]
        live = (await server.client.post(endpoint, json=body)).json()
        for line in output.values():
            response = line["response"]
            assert (line["error"], response["status_code"], response["body"]["usage"]) == (None, 200, live["usage"])
            assert response["body"]["object"] == live["object"]
            assert line["id"] == response["request_id"]


async def test_lines_that_are_refused_are_in_the_error_file(server: Gateway) -> None:
    wrong: list[dict[str, Any]] = [
        {"prompt": "Hi", "colour": "red"},
        {"prompt": "Hi", "temperature": 7},
        {"prompt": "Hi", "stream": True},
        {"prompt": "Hi", "model": "other"},
    ]
    batch = await ended(server, await begin(server, input_of(BODY, *wrong)))
    assert batch.request_counts is not None
    assert (batch.status, batch.request_counts.completed, batch.request_counts.failed) == ("completed", 1, 4)
    assert list(await content(server, batch.output_file_id)) == ["line-0"]
    assert server.metric("nsm_batch_lines_total", outcome="completed") == 1
    assert server.metric("nsm_batch_lines_total", outcome="failed") == 4
    assert server.metric("nsm_batch_lines_running") == 0
    errors = await content(server, batch.error_file_id)
    refusals = [
        (line["response"]["status_code"], line["response"]["body"]["error"]["param"]) for line in errors.values()
    ]
    assert refusals == [(400, "colour"), (400, "temperature"), (400, "stream"), (404, "model")]


@pytest.mark.parametrize(
    ("raw", "code", "line"),
    [
        (b"", "empty_file", None),
        (b"\n \n", "empty_file", None),
        (b"{", "invalid_json", 1),
        (b"[]", "invalid_line", 1),
        (input_of(BODY) + input_of(BODY), "duplicate_custom_id", 2),
        (input_of(BODY, url="/v1/chat/completions"), "mismatched_endpoint", 1),
        (
            json.dumps({"custom_id": "a", "method": "GET", "url": "/v1/completions", "body": {}}).encode(),
            "invalid_line",
            1,
        ),
        (json.dumps({"method": "POST", "url": "/v1/completions", "body": {}}).encode(), "invalid_line", 1),
        (json.dumps({"custom_id": "a", "method": "POST", "url": "/v1/completions"}).encode(), "invalid_line", 1),
    ],
)
async def test_a_file_with_a_wrong_line_is_not_run(server: Gateway, raw: bytes, code: str, line: int | None) -> None:
    batch = await ended(server, await begin(server, raw))
    assert batch.status == "failed"
    assert batch.errors is not None
    assert batch.errors.data is not None
    assert [(error.code, error.line) for error in batch.errors.data] == [(code, line)]
    assert (batch.output_file_id, batch.error_file_id) == (None, None)


async def test_a_body_that_makes_no_batch_is_refused_by_name(server: Gateway) -> None:
    batch_file = await server.openai.files.create(file=("a", b"x"), purpose="batch")
    other_file = await server.openai.files.create(file=("a", b"x"), purpose="user_data")
    good = {"input_file_id": batch_file.id, "endpoint": "/v1/completions", "completion_window": "24h"}
    for change, status, param in (
        ({"input_file_id": "file-none"}, 404, "input_file_id"),
        ({"input_file_id": other_file.id}, 400, "input_file_id"),
        ({"endpoint": "/v1/images"}, 400, "endpoint"),
        ({"completion_window": "1h"}, 400, "completion_window"),
        ({"colour": "red"}, 400, "colour"),
    ):
        refused = await server.client.post("/v1/batches", json={**good, **change})
        assert (refused.status_code, error_of(refused)["param"]) == (status, param)
    missing = await server.client.get("/v1/batches/batch_none")
    assert (missing.status_code, error_of(missing)["code"]) == (404, "batch_not_found")


async def test_batches_are_listed_the_newest_first(server: Gateway) -> None:
    made = [await begin(server, input_of(BODY)) for _ in range(3)]
    listed = [batch.id async for batch in server.openai.batches.list(limit=2)]
    assert listed == [batch.id for batch in reversed(made)]


async def test_a_cancelled_batch_keeps_what_was_answered() -> None:
    backend = FakeBackend(hold=True)
    async with gateway(backend, is_live=True, lease_s=1.0) as server:
        batch = await begin(server, input_of(*[BODY] * 40))
        backend.release(8)
        await backend.held.wait()
        cancelling = await server.openai.batches.cancel(batch.id)
        assert cancelling.status in ("cancelling", "cancelled")
        batch = await ended(server, cancelling)
        assert (batch.status, batch.completed_at) == ("cancelled", None)
        assert batch.cancelled_at is not None
        assert not backend.running
        assert batch.request_counts is not None
        output = await content(server, batch.output_file_id)
        assert len(output) == batch.request_counts.completed < 40
        with pytest.raises(openai.BadRequestError, match="cannot be cancelled"):
            await server.openai.batches.cancel(batch.id)


async def test_a_result_that_is_being_stored_when_its_batch_is_cancelled_counts(
    server: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_storing, may_store, put_result = asyncio.Event(), asyncio.Event(), BatchLibrary.put_result

    async def slow(self: BatchLibrary, batch: Any, number: int, result: dict[str, Any]) -> None:
        is_storing.set()
        await may_store.wait()
        await put_result(self, batch, number, result)

    monkeypatch.setattr(BatchLibrary, "put_result", slow)
    made = await begin(server, input_of(BODY))
    await is_storing.wait()
    (run,) = [task for task in asyncio.all_tasks() if task.get_coro().__qualname__ == "BatchRun._run_line"]
    run.cancel()
    await asyncio.sleep(0)
    assert not run.done()
    may_store.set()
    batch = await ended(server, made)
    assert batch.request_counts is not None
    assert (batch.status, batch.request_counts.completed) == ("completed", 1)
    assert list(await content(server, batch.output_file_id)) == ["line-0"]
    assert server.metric("nsm_batch_lines_total", outcome="completed") == 1


async def test_what_is_not_run_in_time_expires() -> None:
    backend = FakeBackend(hold=True)
    async with gateway(backend, is_live=True, lease_s=1.0) as server:
        batch = await begin(server, input_of(BODY, BODY, BODY))
        await backend.held.wait()
        library = BatchLibrary(server.services.records)
        await library.change("default", batch.id, lambda one: one.changed(expires_at=int(time.time()) - 1))
        batch = await ended(server, batch)
        assert (batch.status, batch.output_file_id) == ("expired", None)
        errors = await content(server, batch.error_file_id)
        assert [line["error"]["code"] for line in errors.values()] == ["batch_expired"] * 3
        assert [line["response"] for line in errors.values()] == [None] * 3


async def test_a_full_server_is_waited_for() -> None:
    backend = FakeBackend()
    backend.is_full = True
    async with gateway(backend, is_live=True) as server:
        batch = await begin(server, input_of(BODY))
        backend.is_full = False
        assert (await ended(server, batch)).status == "completed"


async def test_a_live_request_finds_a_slot_while_a_batch_runs() -> None:
    """A batch takes half of the slots, and one beside live requests."""
    backend = FakeBackend(hold=True)
    async with gateway(backend, is_live=True) as server:
        await begin(server, input_of(*[BODY] * 40))
        await until(lambda: len(backend.running) == 8)
        assert len(backend.running) == 8  # of 16 slots
        live = asyncio.create_task(server.client.post("/v1/completions", json={**BODY, "max_tokens": 1}))
        await until(lambda: len(backend.running) == 9)
        backend.release(10_000)
        assert (await live).status_code == 200


async def test_lines_give_way_to_a_live_request_that_waits_and_run_again() -> None:
    backend = FakeBackend(hold=True)
    async with gateway(backend, is_live=True) as server:
        batch = await begin(server, input_of(*[BODY] * 8))
        await until(lambda: len(backend.running) == 8)
        backend.stats().num_waiting = 1  # all slots are taken, and somebody else waits
        await until(lambda: not backend.running)
        backend.stats().num_waiting = 0
        backend.release(10_000)
        batch = await ended(server, batch)
        assert len(await content(server, batch.output_file_id)) == 8


async def test_batches_belong_to_their_tenant(tmp_path: Path) -> None:
    acme, rival = make_key("acme"), make_key("rival")
    path = write_keys(tmp_path / "keys.toml", acme, rival, acme="", rival="")
    async with gateway(FakeBackend(), api_keys_file=path) as server:
        form: dict[str, Any] = {"files": {"file": ("a", input_of(BODY))}, "data": {"purpose": "batch"}}
        file = (await server.client.post("/v1/files", headers=acme.headers, **form)).json()
        body = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
        made = (await server.client.post("/v1/batches", json=body, headers=acme.headers)).json()
        for key, status in ((acme, 200), (rival, 404)):
            found = await server.client.get(f"/v1/batches/{made['id']}", headers=key.headers)
            assert found.status_code == status
        refused = await server.client.post("/v1/batches", json=body, headers=rival.headers)
        assert (refused.status_code, error_of(refused)["param"]) == (404, "input_file_id")
        assert (await server.client.get("/v1/batches", headers=rival.headers)).json()["data"] == []


async def test_a_batch_on_an_engine_gives_the_texts_of_live_requests(make_backend: MakeBackend) -> None:
    bodies = [{"prompt": [5, 6, 7 + number], "max_tokens": 4, "seed": number} for number in range(6)]
    async with gateway(make_backend(), is_live=True) as server:
        batch = await ended(server, await begin(server, input_of(*bodies)))
        output = await content(server, batch.output_file_id)
        for number, body in enumerate(bodies):
            live = (await server.client.post("/v1/completions", json=body)).json()
            assert output[f"line-{number}"]["response"]["body"]["choices"] == live["choices"]


async def test_the_oldest_batch_that_has_ended_makes_room(server: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.batches.library.MAX_IDS", 2)
    monkeypatch.setattr("service.files.index.MAX_IDS", 4)  # of its files: room for three inputs and one output
    first = await ended(server, await begin(server, b"no line"))
    second = await ended(server, await begin(server, b"no line"))
    third = await begin(server, b"no line")
    assert [one.id async for one in server.openai.batches.list()] == [third.id, second.id]
    with pytest.raises(openai.NotFoundError):
        await server.openai.batches.retrieve(first.id)


async def test_the_engine_knows_which_requests_are_a_batchs() -> None:
    """On each endpoint; a live request beside them is none of them."""
    backend = FakeBackend()
    async with gateway(backend, is_live=True) as server:
        for endpoint, body in BODIES.items():
            backend.requests.clear()
            await ended(server, await begin(server, input_of(body, url=endpoint), endpoint=endpoint))
            assert {request.is_background for request in backend.requests} == {True}
            backend.requests.clear()
            assert (await server.client.post(endpoint, json=body)).status_code == 200
            assert {request.is_background for request in backend.requests} == {False}


@pytest.mark.parametrize("names", [{}, {"model": "ft:fake-nsm:tuned"}], ids=["its own name", "a tuned state of it"])
async def test_a_batch_whose_model_was_replaced_ends_without_answers_of_the_new_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, names: dict[str, str]
) -> None:
    body, path = {"prompt": "Hi", "max_tokens": 1}, tmp_path / "sessions.db"
    before, after = FakeBackend(fingerprint="a" * 64), FakeBackend(fingerprint="b" * 64)
    async with gateway(before, is_live=True, store=SqliteSessionStore(path)) as server:
        state = await server.client.post("/v1/states", json={"name": "tuned", "text": "Once"})
        assert state.status_code == 200
        before.hold_on()
        made = await begin(server, input_of(*[body | names] * 10))
        before.release(3)
        await until(lambda: server.metric("nsm_batch_lines_total", outcome="completed") == 3)
    async with gateway(after, is_live=True, store=SqliteSessionStore(path)) as server:
        batch = await ended(server, made)
        assert batch.request_counts is not None
        counts = batch.request_counts
        assert (batch.status, counts.completed, counts.failed) == ("completed", 3, 7)
        errors = await content(server, batch.error_file_id)
        assert {line["error"]["code"] for line in errors.values()} == {"model_changed"}
        assert len(await content(server, batch.output_file_id)) == 3
        assert after.requests == []
        again = await ended(server, await begin(server, input_of(*[body] * 10)))
        assert again.request_counts is not None
        assert (again.request_counts.completed, again.errors) == (10, None)
    assert batch.errors is not None
    (error,) = batch.errors.data or []
    message = f"the batch began with model {'a' * 12}, {'b' * 12} runs now: 7 requests are not run"
    assert (error.code, error.message) == ("model_changed", message)
    assert f"batch {batch.id}: {message}" in caplog.messages


async def test_two_gateways_on_one_store_run_a_batch_once(tmp_path: Path) -> None:
    """Each has a runner that looks for batches; one takes it, and each line reaches an engine once."""
    backends, path = [FakeBackend(), FakeBackend()], tmp_path / "sessions.db"
    async with (
        gateway(backends[0], is_live=True, store=SqliteSessionStore(path)) as first,
        gateway(backends[1], is_live=True, store=SqliteSessionStore(path)) as second,
    ):
        for server, other in ((first, second), (second, first)):
            made = await begin(server, input_of(*[BODY] * 20))
            other.services.batch_news.set()
            batch = await ended(other, made)
            assert batch.request_counts is not None
            assert (batch.status, batch.request_counts.completed) == ("completed", 20)
            assert len(await content(other, batch.output_file_id)) == 20
    assert sum(len(backend.requests) for backend in backends) == 40
