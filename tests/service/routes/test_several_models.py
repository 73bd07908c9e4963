"""Several models in one server: loaded when a request names them, unloaded for one another."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import weakref
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from nsm_core.errors import CheckpointError
from service.served_models import OtherModel
from service.stores.sessions.sqlite import SqliteSessionStore
from tests.support.batches import input_of, lines_of
from tests.support.fakes import FakeBackend
from tests.support.gateway import Gateway, error_of, gateway, until

MB = 2**20
FIRST = "fake-nsm"


class Shelf:
    """Models beside the first, and the backends that were loaded, the newest last."""

    def __init__(self, *names: str, num_mb: int = 60, hold: bool = False) -> None:
        self.loaded: dict[str, list[FakeBackend]] = {name: [] for name in names}
        self.broken: set[str] = set()
        self._num_mb, self._hold = num_mb, hold

    @property
    def models(self) -> list[OtherModel]:
        return [
            OtherModel(
                name=name,
                fingerprint=f"fingerprint-of-{name}",
                num_file_bytes=self._num_mb * MB,
                load=lambda name=name: self._load(name),  # type: ignore[misc]
            )
            for name in self.loaded
        ]

    def _load(self, name: str) -> FakeBackend:
        if name in self.broken:
            raise CheckpointError(f"/secret/{name} is cut")
        made = FakeBackend(f" said by {name}", fingerprint=f"fingerprint-of-{name}", hold=self._hold)
        made.model = dataclasses.replace(made.model, name=name, state_bytes=0)
        self.loaded[name].append(made)
        return made


@contextlib.asynccontextmanager
async def serving(shelf: Shelf, **settings: Any) -> AsyncIterator[Gateway]:
    names = ",".join(f"{name}=/models/{name}" for name in shelf.loaded)
    async with gateway(FakeBackend(" said by the first"), others=shelf.models, models=names, **settings) as server:
        yield server


async def complete(server: Gateway, model: str | None, **body: Any) -> httpx.Response:
    named = {} if model is None else {"model": model}
    return await server.client.post("/v1/completions", json={"prompt": "x", "max_tokens": 40, **named, **body})


async def text_of(server: Gateway, model: str | None) -> str:
    answer = (await complete(server, model)).json()
    assert answer["model"] == (model or FIRST)
    return str(answer["choices"][0]["text"])


async def statuses(server: Gateway) -> dict[str, str]:
    models = (await server.client.get("/v1/models")).json()["data"]
    return {model["id"]: model["status"] for model in models}


async def test_a_request_loads_the_model_that_it_names() -> None:
    shelf = Shelf("blue", "red")
    async with serving(shelf) as server:
        assert await statuses(server) == {FIRST: "loaded", "blue": "unloaded", "red": "unloaded"}
        assert await text_of(server, None) == " said by the first"
        assert await text_of(server, "red") == " said by red"
        assert await statuses(server) == {FIRST: "loaded", "blue": "unloaded", "red": "loaded"}
        chat = {"model": "red", "messages": [{"role": "user", "content": "x"}], "max_tokens": 40}
        answer = (await server.client.post("/v1/chat/completions", json=chat)).json()
        assert answer["model"] == "red"
        assert "red" in answer["choices"][0]["message"]["content"]
        assert [len(loaded) for loaded in shelf.loaded.values()] == [0, 1]
        assert server.metric("nsm_model_loaded", model_name="red") == 1
        assert server.metric("nsm_model_loaded", model_name="blue") == 0
        assert server.metric("nsm_model_loads_total", model_name="red", outcome="loaded") == 1
    assert not shelf.loaded["red"][0].ready  # it stops with the server


async def test_many_requests_at_once_load_a_model_once() -> None:
    shelf = Shelf("blue")
    async with serving(shelf) as server:
        texts = await asyncio.gather(*(text_of(server, "blue") for _ in range(5)))
    assert texts == [" said by blue"] * 5
    assert len(shelf.loaded["blue"]) == 1


async def test_a_model_that_is_not_served_is_404_and_names_the_others() -> None:
    async with serving(Shelf("blue")) as server:
        response = await complete(server, "green")
        detail = await server.client.get("/v1/models/green")
    assert response.status_code == detail.status_code == 404
    error = error_of(response)
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert "'fake-nsm' and 'blue'" in error["message"]


async def test_the_least_recently_used_model_makes_room() -> None:
    shelf = Shelf("blue", "red", "grey")
    async with serving(shelf, models_memory_mb=130) as server:
        for name in ("blue", "red", "blue", "grey"):
            await text_of(server, name)
        assert await statuses(server) == {FIRST: "loaded", "blue": "loaded", "red": "unloaded", "grey": "loaded"}
        gone = weakref.ref(shelf.loaded["red"].pop())
        assert gone() is None  # and its memory is free
        assert await text_of(server, "red") == " said by red"  # again
        assert [len(loaded) for loaded in shelf.loaded.values()] == [1, 1, 1]
        assert server.metric("nsm_model_unloads_total", model_name="red") == 1


async def test_a_model_in_use_stays_and_the_other_request_gets_503() -> None:
    shelf = Shelf("blue", "red", hold=True)
    async with serving(shelf, models_memory_mb=100) as server:
        running = asyncio.create_task(complete(server, "blue"))
        await until(lambda: bool(shelf.loaded["blue"]) and bool(shelf.loaded["blue"][0].requests))
        response = await complete(server, "red")
        assert response.status_code == 503
        assert int(response.headers["retry-after"]) > 0
        assert error_of(response)["code"] == "model_unavailable"
        shelf.loaded["blue"][0].release(99)
        assert (await running).status_code == 200
        retry = asyncio.create_task(complete(server, "red"))
        await until(lambda: bool(shelf.loaded["red"]) and bool(shelf.loaded["red"][0].requests))
        shelf.loaded["red"][0].release(99)
        assert (await retry).status_code == 200
        assert await statuses(server) == {FIRST: "loaded", "blue": "unloaded", "red": "loaded"}


async def test_a_model_that_cannot_be_loaded_leaves_the_others() -> None:
    shelf = Shelf("blue", "red")
    shelf.broken.add("red")
    async with serving(shelf) as server:
        response = await complete(server, "red")
        assert response.status_code == 503
        error = error_of(response)
        assert (error["code"], error["param"]) == ("model_unavailable", "model")
        assert "'red'" in error["message"]
        assert "/secret" not in response.text
        assert await text_of(server, "blue") == " said by blue"
        assert await statuses(server) == {FIRST: "loaded", "blue": "loaded", "red": "failed"}
        assert "/secret" not in (await server.client.get("/v1/models")).text
        assert (await server.client.get("/health/ready")).status_code == 200
        assert server.metric("nsm_model_loads_total", model_name="red", outcome="failed") == 1


async def test_a_model_larger_than_the_limit_is_refused() -> None:
    async with serving(Shelf("blue"), models_memory_mb=50) as server:
        response = await complete(server, "blue")
    assert response.status_code == 503
    assert "60 MiB" in error_of(response)["message"]
    assert "50" in error_of(response)["message"]


async def test_a_client_that_leaves_does_not_end_the_load() -> None:
    shelf = Shelf("blue", hold=True)
    async with serving(shelf) as server:
        request = asyncio.create_task(complete(server, "blue"))
        await until(lambda: bool(shelf.loaded["blue"]))
        request.cancel()
        await asyncio.wait((request,))
        await until(lambda: server.services.models.loaded_as("blue") is not None)
        assert await statuses(server) == {FIRST: "loaded", "blue": "loaded"}


async def create_session(server: Gateway, **body: Any) -> dict[str, Any]:
    response = await server.client.post("/v1/sessions", json=body)
    assert response.status_code == 200, response.text
    return dict(response.json())


async def test_a_session_stays_with_its_model() -> None:
    """After an unload too. Without a model a turn runs on the session's own; with another one it is refused."""
    shelf = Shelf("blue", "red")
    async with serving(shelf, models_memory_mb=100) as server:
        assert (await create_session(server, id="s", model="blue"))["model"] == "blue"
        path, body = "/v1/sessions/s/generate", {"input": "x", "max_tokens": 40}
        for model in ({}, {"model": "blue"}):
            await text_of(server, "red")  # blue is unloaded
            answer = (await server.client.post(path, json={**body, **model})).json()
            assert (answer["model"], answer["choices"][0]["text"]) == ("blue", " said by blue")
            assert "rebuilt" not in answer["session"]
        for model in ("red", FIRST):
            response = await server.client.post(path, json={**body, "model": model})
            assert response.status_code == 409
            error = error_of(response)
            assert (error["code"], error["param"]) == ("state_mismatch", "model")
            assert "'blue'" in error["message"]
        response = await server.client.post(path, json={**body, "model": "green"})
        assert (response.status_code, error_of(response)["param"]) == (404, "model")
        appended = await server.client.post("/v1/sessions/s/append", json={"input": "y"})
        assert appended.json()["model"] == "blue"
        forked = (await server.client.post("/v1/sessions/s/fork", json={"id": "f"})).json()
        assert (forked["model"], forked["version"]) == ("blue", 3)
        cleared = await server.client.post("/v1/sessions/s/clear", json={"mark": 2})
        assert cleared.status_code == 200, cleared.text
        listed = (await server.client.get("/v1/sessions")).json()["data"]
        assert {one["id"]: one["model"] for one in listed} == {"s": "blue", "f": "blue"}
        assert (await server.client.delete("/v1/sessions/s")).status_code == 200


async def test_a_running_turn_of_any_model_is_cancelled_and_deleted() -> None:
    shelf = Shelf("blue", hold=True)
    async with serving(shelf) as server:
        for act in ("cancel", "delete"):
            await create_session(server, id=act, model="blue")
            path, body = f"/v1/sessions/{act}/generate", {"input": "x", "max_tokens": 40}
            running = asyncio.create_task(server.client.post(path, json=body))
            backend = shelf.loaded["blue"][0] if shelf.loaded["blue"] else None
            await until(lambda: bool(shelf.loaded["blue"]) and bool(shelf.loaded["blue"][0].running))
            if act == "cancel":
                answer = await server.client.post(f"/v1/sessions/{act}/cancel")
                assert answer.json()["cancelled"] is True
            else:
                assert (await server.client.delete(f"/v1/sessions/{act}")).status_code == 200
            assert (await running).status_code in (404, 409)
            assert backend is None or not backend.running


async def test_a_session_file_comes_back_to_its_model() -> None:
    async with serving(Shelf("blue")) as server:
        await create_session(server, id="s", model="blue")
        await server.client.post("/v1/sessions/s/generate", json={"input": "x", "max_tokens": 40})
        file = (await server.client.get("/v1/sessions/s/export")).content
        headers = {"content-type": "application/octet-stream"}
        response = await server.client.post("/v1/sessions/import?id=t", content=file, headers=headers)
        assert response.status_code == 200, response.text
        assert response.json()["model"] == "blue"
        assert "rebuilt" not in response.json()


async def test_a_state_stays_with_its_model() -> None:
    async with serving(Shelf("blue")) as server:
        made = await server.client.post("/v1/states", json={"name": "n", "text": "x", "model": "blue"})
        assert made.json()["model"] == "blue", made.text
        started = await complete(server, "blue", state="n@1")
        assert started.status_code == 200, started.text
        response = await complete(server, FIRST, state="n@1")
        assert response.status_code == 409
        error = error_of(response)
        assert (error["code"], error["param"]) == ("state_mismatch", "state")
        assert "'blue'" in error["message"]


async def test_a_chain_of_responses_stays_with_its_model() -> None:
    async with serving(Shelf("blue")) as server:
        first = (await server.client.post("/v1/responses", json={"model": "blue", "input": "x"})).json()
        assert first["model"] == "blue", first
        after = {"input": "y", "previous_response_id": first["id"]}
        second = await server.client.post("/v1/responses", json={**after, "model": "blue"})
        assert second.status_code == 200, second.text
        other = await server.client.post("/v1/responses", json={**after, "model": FIRST})
        assert (other.status_code, error_of(other)["param"]) == (409, "model")
        conversation = (await server.client.post("/v1/conversations", json={})).json()["id"]
        inside = {"input": "x", "conversation": conversation}
        assert (await server.client.post("/v1/responses", json={**inside, "model": "blue"})).status_code == 200
        other = await server.client.post("/v1/responses", json={**inside, "model": FIRST})
        assert (other.status_code, error_of(other)["param"]) == (409, "model")
        assert (await server.client.delete(f"/v1/responses/{first['id']}")).status_code == 200


async def test_a_chain_without_a_model_is_served_by_its_own() -> None:
    """Of responses and of conversations, while blue is not loaded too."""
    shelf = Shelf("blue", "red")
    async with serving(shelf, models_memory_mb=100) as server:
        conversation = (await server.client.post("/v1/conversations", json={})).json()["id"]
        first = (await server.client.post("/v1/responses", json={"model": "blue", "input": "x"})).json()
        inside = {"input": "x", "conversation": conversation}
        assert (await server.client.post("/v1/responses", json={**inside, "model": "blue"})).status_code == 200
        for body in ({"input": "y", "previous_response_id": first["id"]}, inside):
            await text_of(server, "red")  # blue is unloaded
            answer = (await server.client.post("/v1/responses", json=body)).json()
            assert (answer["model"], answer["output"][0]["content"][0]["text"]) == ("blue", "said by blue")
            counted = await server.client.post("/v1/responses/input_tokens", json=body)
            assert counted.status_code == 200, counted.text
        gone = await server.client.post("/v1/responses", json={"input": "y", "previous_response_id": "resp_none"})
        assert (gone.status_code, error_of(gone)["param"]) == (404, "previous_response_id")


async def test_a_state_without_a_model_is_served_by_its_own() -> None:
    """Named, or brought along."""
    async with serving(Shelf("blue")) as server:
        made = await server.client.post("/v1/states", json={"name": "n", "text": "x", "model": "blue"})
        assert made.status_code == 200, made.text
        returned = (await complete(server, "blue", return_state=True)).json()["state"]["data"]
        for state in ("n", "n@1", returned):
            messages = [{"role": "user", "content": "x"}]
            bodies: dict[str, dict[str, Any]] = {
                "/v1/completions": {"prompt": "x"},
                "/v1/chat/completions": {"messages": messages},
                "/v1/responses": {"input": "x", "store": False},
                "/v1/sessions": {},
            }
            for path, body in bodies.items():
                answer = await server.client.post(path, json={**body, "state": state})
                assert answer.status_code == 200, answer.text
                assert answer.json()["model"] == "blue"
        for state, status in (("none", 404), ("A" * 200, 400)):
            refused = await complete(server, None, state=state)
            assert (refused.status_code, error_of(refused)["param"]) == (status, "state")


async def test_lines_of_a_batch_run_on_the_models_that_they_name() -> None:
    raw = input_of(*({"prompt": "x", "max_tokens": 40, "model": model} for model in (FIRST, "blue", "green")))
    async with serving(Shelf("blue"), is_live=True) as server:
        file = await server.openai.files.create(file=("in.jsonl", raw), purpose="batch")
        batch = await server.openai.batches.create(
            input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
        )
        while batch.status != "completed":
            await asyncio.sleep(0.02)
            batch = await server.openai.batches.retrieve(batch.id)
        output = await server.openai.files.content(batch.output_file_id or "")
        results = {name: line["response"]["body"] for name, line in lines_of(output.content).items()}
    texts = {name: body["choices"][0]["text"] for name, body in results.items()}
    assert texts == {"line-0": " said by the first", "line-1": " said by blue"}
    assert batch.request_counts is not None
    assert batch.request_counts.to_dict() == {"total": 3, "completed": 2, "failed": 1}


@pytest.mark.parametrize("model", [None, "blue"])
async def test_tokens_are_those_of_the_model(model: str | None) -> None:
    async with serving(Shelf("blue")) as server:
        body = {"prompt": "x"} if model is None else {"prompt": "x", "model": model}
        answer = await server.client.post("/tokenize", json=body)
        assert answer.status_code == 200
        status = (await statuses(server))["blue"]
    assert status == ("unloaded" if model is None else "loaded")


async def test_a_session_whose_model_is_no_longer_named_is_refused(tmp_path: Path) -> None:
    """Also a chain of responses. It goes on once the model is named again."""
    store = tmp_path / "sessions.db"
    async with serving(Shelf("blue"), store=SqliteSessionStore(store)) as server:
        await create_session(server, id="s", model="blue")
        path, body = "/v1/sessions/s/generate", {"input": "x", "max_tokens": 40}
        assert (await server.client.post(path, json=body)).status_code == 200
    for shelf in (Shelf(), Shelf("red")):
        async with serving(shelf, store=SqliteSessionStore(store)) as server:
            response = await server.client.post(path, json=body)
            error = error_of(response)
            assert (response.status_code, error["code"]) == (409, "state_mismatch")
            assert "`nsm sessions migrate`" in error["message"]
            assert "`nsm serve --model RUNNING --model before=DIRECTORY`" in error["message"]
            assert (await server.client.get("/v1/sessions/s")).json()["version"] == 1
    async with serving(Shelf("blue"), store=SqliteSessionStore(store)) as server:
        answer = (await server.client.post(path, json=body)).json()
        assert (answer["model"], answer["session"]["version"]) == ("blue", 2)


async def test_a_restart_finds_the_sessions_of_all_models(tmp_path: Path) -> None:
    """A server without the model shows the session without a name."""
    for shelf, shown in ((Shelf("blue"), "blue"), (Shelf("red", "blue"), "blue"), (Shelf(), None)):
        async with serving(shelf, store=SqliteSessionStore(tmp_path / "sessions.db")) as server:
            if shown == "blue" and "red" not in shelf.loaded:
                await create_session(server, id="s", model="blue")
            sessions = (await server.client.get("/v1/sessions")).json()["data"]
            assert [one["model"] for one in sessions] == [shown]
