from __future__ import annotations

import openai
import pytest

from tests.fakes import STATE_BYTES, FakeBackend
from tests.gateway import error_of, gateway


async def test_the_stock_client_finds_the_model() -> None:
    async with gateway(FakeBackend(), is_live=True) as server:
        models = [model async for model in server.openai.models.list()]
        model = await server.openai.models.retrieve("fake-nsm")
        with pytest.raises(openai.NotFoundError):
            await server.openai.models.retrieve("gpt-9")
    assert models == [model]
    assert (model.id, model.object, model.created) == ("fake-nsm", "model", 1_700_000_000)


async def test_the_model_object_tells_what_is_special_here() -> None:
    async with gateway(FakeBackend(), max_tokens_limit=99) as server:
        model = (await server.client.get("/v1/models/fake-nsm")).json()
    assert model["state_bytes"] == STATE_BYTES
    assert model["fingerprint"] == "fake-fingerprint"
    assert model["numerics"] == "fake"
    assert model["max_model_len"] is None
    assert model["limits"]["max_tokens"] == 99


async def test_the_operator_may_name_the_model_even_with_slashes() -> None:
    async with gateway(FakeBackend(), served_model_name="org/nsm") as server:
        assert (await server.client.get("/v1/models/org/nsm")).json()["id"] == "org/nsm"
        answer = await server.client.post("/v1/completions", json={"model": "org/nsm", "prompt": "x"})
        assert answer.json()["model"] == "org/nsm"
        missing = await server.client.get("/v1/models/fake-nsm")
    assert missing.status_code == 404
    assert error_of(missing)["param"] == "model"
