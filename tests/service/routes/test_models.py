from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest

from tests.support.fakes import STATE_BYTES, FakeBackend
from tests.support.gateway import Gateway, error_of, gateway
from tests.support.tenants import make_key, write_keys


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


async def test_R16_states_are_exact_unless_the_operator_says_so_and_the_fingerprint_tells() -> None:
    fingerprints = {}
    for changes in ({}, {"state_dtype": "fp16"}, {"state_dtype": "int8"}):
        async with gateway(FakeBackend(), **changes) as server:
            model = (await server.client.get("/v1/models/fake-nsm")).json()
            answer = (await server.client.post("/v1/completions", json={"prompt": "x", "max_tokens": 1})).json()
            assert answer["system_fingerprint"] == model["system_fingerprint"]
            fingerprints[model["state_dtype"]] = model["system_fingerprint"]
    exact = fingerprints["fp32"]
    assert fingerprints == {"fp32": exact, "fp16": f"{exact}_fp16", "int8": f"{exact}_int8"}


async def test_R18_what_is_switched_off_says_so(tmp_path: Path) -> None:
    async with gateway(FakeBackend()) as server:
        model = await model_of(server)
        assert (model["prefix_cache"], model["retained_snapshots"]) == (True, 2)
        assert 'nsm_prefix_resume_total{outcome="off"} 0.0' in (await server.client.get("/metrics")).text
    async with gateway(FakeBackend(), prefix_cache_mb=0, retained_snapshots=0) as server:
        model = await model_of(server)
        assert (model["prefix_cache"], model["retained_snapshots"]) == (False, 0)
        await server.client.post("/v1/completions", json={"prompt": "x", "max_tokens": 1})
        text = (await server.client.get("/metrics")).text
        assert 'nsm_prefix_resume_total{outcome="off"} 1.0' in text
        assert 'nsm_prefix_resume_total{outcome="hit"} 0.0' in text
    acme, other = make_key("acme"), make_key("other")
    write_keys(tmp_path / "keys.toml", acme, other, acme="prefix_cache = false", other="")
    async with gateway(FakeBackend(), api_keys_file=tmp_path / "keys.toml") as server:
        assert (await model_of(server, headers=acme.headers))["prefix_cache"] is False
        assert (await model_of(server, headers=other.headers))["prefix_cache"] is True


async def model_of(server: Gateway, **request: Any) -> dict[str, Any]:
    return dict((await server.client.get("/v1/models/fake-nsm", **request)).json())


async def test_the_operator_may_name_the_model_even_with_slashes() -> None:
    async with gateway(FakeBackend(), served_model_name="org/nsm") as server:
        assert (await server.client.get("/v1/models/org/nsm")).json()["id"] == "org/nsm"
        answer = await server.client.post("/v1/completions", json={"model": "org/nsm", "prompt": "x"})
        assert answer.json()["model"] == "org/nsm"
        missing = await server.client.get("/v1/models/fake-nsm")
        slash = await server.client.get("/v1/models/")
    assert missing.status_code == 404
    assert error_of(missing)["param"] == "model"
    assert (slash.status_code, error_of(slash)["message"]) == (404, "nothing is served at GET /v1/models/")
