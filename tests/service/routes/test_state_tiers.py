"""Sessions that asked for fewer states: smaller for their whole life, and exactly as good as a model with so many."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from nsm_core.config import EngineConfig
from nsm_core.tokenizer import Tokenizer
from service.backends.local import LocalBackend
from service.stores.sessions.sqlite import SqliteSessionStore
from service.transfer.backup import SessionName
from service.transfer.verify import verify
from tests.fakes import FakeBackend
from tests.gateway import Gateway, error_of, gateway
from tests.models import RandomModel, as_loaded

SLOTS, TIERS = 64, (16, 32)
TURN = {"input": "The night was", "max_tokens": 6, "temperature": 1.0, "seed": 7}


def make_backend(tokenizer: Tokenizer, *, tiers: tuple[int, ...] = TIERS, fingerprint: str = "random") -> LocalBackend:
    """Two layers whose states are nearly all slots."""
    model = RandomModel(
        tokenizer.vocab_size, num_memory_slots=SLOTS, write_top_k=SLOTS, router="sigmoid", state_tiers=tiers
    )
    loaded = as_loaded(model.eval(), tokenizer, fingerprint=fingerprint)
    return LocalBackend(loaded, EngineConfig(max_slots=4, token_budget=32, queue_limit=8))


@contextlib.asynccontextmanager
async def server(tokenizer: Tokenizer, path: Path, **model: Any) -> AsyncIterator[Gateway]:
    """A process with the store at `path`."""
    async with gateway(make_backend(tokenizer, **model), store=SqliteSessionStore(path / "sessions.db")) as made:
        yield made


async def create(house: Gateway, session_id: str, **fields: Any) -> dict[str, Any]:
    response = await house.client.post("/v1/sessions", json={"id": session_id, **fields})
    assert response.status_code == 200, response.text
    return dict(response.json())


async def turn(house: Gateway, session_id: str, **fields: Any) -> dict[str, Any]:
    response = await house.client.post(f"/v1/sessions/{session_id}/generate", json={**TURN, **fields})
    assert response.status_code == 200, response.text
    return dict(response.json())


async def told(house: Gateway, session_id: str) -> dict[str, Any]:
    return dict((await house.client.get(f"/v1/sessions/{session_id}")).json())


def text_of(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["text"])


async def test_a_session_pays_for_the_states_it_asked_for(tiny_tokenizer: Tokenizer, tmp_path: Path) -> None:
    async with server(tiny_tokenizer, tmp_path) as house:
        model = (await house.client.get("/v1/models")).json()["data"][0]
        assert model["num_states"] == SLOTS
        sizes = {tier["num_states"]: tier["state_bytes"] for tier in model["state_tiers"]}
        assert list(sizes) == list(TIERS)
        tails = model["state_bytes"] - 2 * 2 * SLOTS * 2 * 16 * 4  # layers, heads, slots, banks of 16, bytes
        assert sizes[16] - tails == (model["state_bytes"] - tails) // 4
        whole, small = await create(house, "whole"), await create(house, "small", num_states=16)
        assert (whole["num_states"], whole["state_bytes"]) == (SLOTS, model["state_bytes"])
        assert (small["num_states"], small["state_bytes"], small["model"]) == (16, sizes[16], whole["model"])
        for name in ("whole", "small"):
            await turn(house, name)
        stored = {name: (await told(house, name))["snapshot_bytes"] for name in ("whole", "small")}
        assert stored["whole"] - stored["small"] == pytest.approx(model["state_bytes"] - sizes[16], abs=64)
        states = (await house.client.get("/v1/sessions/small/states")).json()
        assert states["state_bytes"] == sizes[16]
        assert [layer["use"]["num_slots"] for layer in states["layers"]] == [16, 16]
        pool = house.services.backend.stats().state_pool_bytes
        assert pool == 4 * (model["state_bytes"] + sum(sizes.values()))


async def test_it_keeps_them_over_restarts_forks_and_files(tiny_tokenizer: Tokenizer, tmp_path: Path) -> None:
    async with server(tiny_tokenizer, tmp_path) as house:
        await create(house, "unbroken", num_states=16)
        await create(house, "s", num_states=16)
        wanted = [text_of(await turn(house, "unbroken", input=text)) for text in ("One", " two", " three")]
        got = [text_of(await turn(house, "s", input="One"))]
    async with server(tiny_tokenizer, tmp_path) as house:
        answer = await turn(house, "s", input=" two")
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        got.append(text_of(answer))
        fork = (await house.client.post("/v1/sessions/s/fork", json={"id": "fork"})).json()
        assert fork["num_states"] == 16
        file = (await house.client.get("/v1/sessions/s/export")).content
        imported = (await house.client.post("/v1/sessions/import", params={"id": "file"}, content=file)).json()
        assert imported["num_states"] == 16
        for name in ("fork", "file"):
            assert text_of(await turn(house, name, input=" three")) == wanted[2]
        got.append(text_of(await turn(house, "s", input=" three")))
        verdicts = [result.verdict async for result in verify(house.store, house.services.backend, await names(house))]
        assert verdicts == ["same"] * 4
    assert got == wanted


async def names(house: Gateway) -> list[SessionName]:
    page = await house.store.list(tenant="default", limit=100)
    return [SessionName("default", head.session_id) for head in page.heads]


async def test_a_rewind_and_a_lost_state_are_read_again_with_so_many_states(
    tiny_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    async with server(tiny_tokenizer, tmp_path) as house:
        await create(house, "s", num_states=32)
        first, second = await turn(house, "s"), await turn(house, "s", input=" and")
        rewound = (await house.client.post("/v1/sessions/s/rewind", json={"to_version": 1})).json()
        assert (rewound["num_states"], rewound["position"]) == (32, (await told(house, "s"))["position"])
        assert text_of(await turn(house, "s", input=" and")) == text_of(second)
        assert text_of(first) != text_of(second)
    async with server(tiny_tokenizer, tmp_path, fingerprint="next") as house:  # another model, the same sizes
        again = await turn(house, "s", input=" so")
        assert again["session"]["rebuilt"] == "fingerprint_mismatch"
        assert (await told(house, "s"))["num_states"] == 32


async def test_sizes_that_the_model_has_not_are_refused(tiny_tokenizer: Tokenizer, tmp_path: Path) -> None:
    async with server(tiny_tokenizer, tmp_path) as house:
        await create(house, "s", num_states=16)
        await turn(house, "s")
        assert (await create(house, "all", num_states=SLOTS))["model_fingerprint"] == "random"
        for wrong in (8, 0, -1, 65):
            response = await house.client.post("/v1/sessions", json={"num_states": wrong})
            assert refusal(response) == (400, "num_states")
            assert "16, 32, 64" in error_of(response)["message"]
    async with server(tiny_tokenizer, tmp_path, tiers=()) as house:
        response = await house.client.post("/v1/sessions/s/generate", json=TURN)
        assert (response.status_code, error_of(response)["code"]) == (409, "state_mismatch")
        assert "(64), got 16" in error_of(response)["message"]
        assert (await told(house, "s"))["num_states"] == 16


async def test_a_backend_without_tiers_refuses_them() -> None:
    async with gateway(FakeBackend()) as house:
        assert refusal(await house.client.post("/v1/sessions", json={"num_states": 16})) == (400, "num_states")


def refusal(response: httpx.Response) -> tuple[int, str | None]:
    return response.status_code, error_of(response)["param"]


async def test_requests_without_a_session_may_ask_too(tiny_tokenizer: Tokenizer, tmp_path: Path) -> None:
    """The answer is that of a new session of so many states, and nothing of it is kept for whole ones."""
    async with server(tiny_tokenizer, tmp_path) as house:
        prompt = {"prompt": "The night was " * 20, "max_tokens": 6, "temperature": 0}
        messages = [{"role": "user", "content": "The night was " * 20}]
        texts = {}
        for size in (None, 16, SLOTS):
            fields = {} if size is None else {"num_states": size}
            response = await house.client.post("/v1/completions", json={**prompt, **fields})
            assert response.status_code == 200, response.text
            texts[size] = text_of(response.json())
            chat = {"messages": messages, "max_completion_tokens": 3, "temperature": 0, **fields}
            assert (await house.client.post("/v1/chat/completions", json=chat)).status_code == 200
        assert texts[None] == texts[SLOTS] != texts[16]
        await create(house, "s", num_states=16)
        assert text_of(await turn(house, "s", input=prompt["prompt"], temperature=0)) == texts[16]
        for path, body in (("completions", prompt), ("chat/completions", {"messages": messages})):
            response = await house.client.post(f"/v1/{path}", json={**body, "num_states": 5})
            assert refusal(response) == (400, "num_states")
            response = await house.client.post(f"/v1/{path}", json={**body, "num_states": 16, "include_routing": True})
            told = response.json()["choices"][0]["routing"]
            assert {layer["num_states"] for token in told for layer in token["layers"]} == {16}
        recent = (await house.client.get("/v1/sessions/s/states", params={"recent": 8})).json()["recent"]
        assert [len(layer["states"]) for layer in recent["layers"]] == [16] * len(recent["layers"]) != []
        response = await house.client.post("/v1/sessions/s/generate", json={**TURN, "num_states": 32})
        assert refusal(response) == (400, "num_states")
