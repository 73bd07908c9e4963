"""Responses and conversations that asked for fewer states: their sessions have so many, while the chain goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nsm_core.tokenizer import Tokenizer
from tests.fakes import FakeBackend
from tests.gateway import Gateway, error_of, gateway
from tests.service.routes.test_state_tiers import SLOTS, server

WISH = {"input": "The night was", "max_output_tokens": 5, "temperature": 0}


async def respond(house: Gateway, **fields: Any) -> dict[str, Any]:
    response = await house.client.post("/v1/responses", json={**WISH, **fields})
    assert response.status_code == 200, response.text
    return dict(response.json())


async def refused(house: Gateway, path: str, body: dict[str, Any]) -> str:
    response = await house.client.post(path, json=body)
    error = error_of(response)
    assert (response.status_code, error["param"]) == (400, "num_states")
    return str(error["message"])


def text_of(response: dict[str, Any]) -> str:
    return str(response["output"][0]["content"][0]["text"])


async def sizes(house: Gateway) -> list[int]:
    heads = (await house.client.get("/v1/sessions")).json()["data"]
    return [head["num_states"] for head in heads]


async def test_a_chain_keeps_the_number_that_it_began_with(tiny_tokenizer: Tokenizer, tmp_path: Path) -> None:
    """On its session, on a fork of it, behind instructions, and where nothing is stored; after a restart too."""
    async with server(tiny_tokenizer, tmp_path) as house:
        whole, first = await respond(house), await respond(house, num_states=16)
        assert text_of(first) != text_of(whole)
        assert text_of(await respond(house, num_states=16, store=False)) == text_of(first)
        second = await respond(house, previous_response_id=first["id"])
        assert second["usage"]["input_tokens_details"]["cached_tokens"] > 0
        assert sorted(await sizes(house)) == [16, SLOTS]
        fork = await respond(house, previous_response_id=first["id"], num_states=16)
        free = await respond(house, previous_response_id=first["id"], store=False)
        assert text_of(second) == text_of(fork) == text_of(free)
        told = await respond(house, previous_response_id=first["id"], instructions="Be short.")
        assert sorted(await sizes(house)) == [16, 16, 16, SLOTS]
        for size in (32, SLOTS):
            body = {**WISH, "previous_response_id": told["id"], "num_states": size}
            assert await refused(house, "/v1/responses", body) == (
                f"num_states must be 16, with which this chain began, got {size}"
            )
        body = {**WISH, "previous_response_id": whole["id"], "num_states": 16}
        assert f"num_states must be {SLOTS}, with which" in await refused(house, "/v1/responses", body)


async def test_a_conversation_says_it_once(tiny_tokenizer: Tokenizer, tmp_path: Path) -> None:
    async with server(tiny_tokenizer, tmp_path) as house:
        made = (await house.client.post("/v1/conversations", json={"num_states": 16})).json()
        plain = (await house.client.post("/v1/conversations", json={"num_states": SLOTS})).json()
        assert (made["num_states"], "num_states" in plain) == (16, False)
        first = await respond(house, conversation=made["id"])
        assert text_of(first) == text_of(await respond(house, num_states=16, store=False))
        await respond(house, conversation=made["id"], num_states=16)
        assert await sizes(house) == [16]
        (session,) = (await house.client.get("/v1/sessions")).json()["data"]
        assert (await house.client.delete(f"/v1/sessions/{session['id']}")).status_code == 200
        await respond(house, conversation=made["id"])  # reads its items again, in the same form
        assert await sizes(house) == [16]
        await refused(house, "/v1/responses", {**WISH, "conversation": made["id"], "num_states": 32})
        await refused(house, "/v1/responses", {**WISH, "conversation": plain["id"], "num_states": 16})


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/conversations", "/v1/responses/input_tokens"])
async def test_a_number_that_the_model_does_not_offer_is_refused_by_name(path: str) -> None:
    async with gateway(FakeBackend()) as house:
        fields = {} if path == "/v1/conversations" else {"input": "Hello"}
        assert "served with (none), got 16" in await refused(house, path, {**fields, "num_states": 16})
        assert await sizes(house) == []
