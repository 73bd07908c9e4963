from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from nsm_core.config import EngineConfig
from nsm_core.tokenizer import Tokenizer
from service.backends.local import LocalBackend
from service.stores.sessions.sqlite import SqliteSessionStore
from tests.nsm_lab.evaluation.models import random_model, small_config
from tests.support.fakes import FakeBackend
from tests.support.gateway import Gateway, error_of, gateway
from tests.support.models import as_loaded
from tests.support.stored_rows import damage_snapshot


@pytest.fixture
async def served(tiny_tokenizer: Tokenizer) -> AsyncIterator[Gateway]:
    model = random_model(small_config(tiny_tokenizer, layer_pattern="WN")).eval().requires_grad_(False)
    loaded = as_loaded(model, tiny_tokenizer)
    async with gateway(LocalBackend(loaded, EngineConfig(max_slots=2, token_budget=32, queue_limit=2))) as made:
        assert (await made.client.post("/v1/sessions", json={"id": "s1"})).status_code == 200
        yield made


async def test_an_empty_session_shows_the_learned_start(served: Gateway) -> None:
    answer = (await served.client.get("/v1/sessions/s1/states")).json()
    assert (answer["position"], answer["version"], answer["dtype"], answer["detail"]) == (0, 0, None, "layer")
    window, slots = answer["layers"]
    assert (window["kind"], window["filled"]) == ("attention", 0)
    assert set(slots) == {"layer", "kind", "num_bytes", "use"}
    assert (slots["use"]["untouched_share"], slots["use"]["effective_slots"]) == (1.0, 0.0)


async def test_a_turn_shows_in_the_states_and_looking_changes_nothing(served: Gateway) -> None:
    turn = {"input": "Hello", "max_tokens": 3, "temperature": 0}
    assert (await served.client.post("/v1/sessions/s1/generate", json=turn)).status_code == 200
    session = (await served.client.get("/v1/sessions/s1")).json()
    answer = (await served.client.get("/v1/sessions/s1/states", params={"detail": "slot", "layer": 1})).json()
    assert (answer["position"], answer["dtype"]) == (session["position"], "float32")
    (layer,) = answer["layers"]
    assert [len(head["slots"]) for head in layer["heads"]] == [8, 8]
    assert layer["use"]["mean"]["moved"] > 0
    assert (await served.client.get("/v1/sessions/s1")).json() == session


@pytest.mark.parametrize(
    ("query", "param"),
    [({"detail": "slot"}, "layer"), ({"layer": 2}, "layer"), ({"layer": -1}, "layer"), ({"detail": "all"}, "detail")],
)
async def test_a_wrong_wish_names_the_field(served: Gateway, query: dict[str, str | int], param: str) -> None:
    response = await served.client.get("/v1/sessions/s1/states", params=query)
    assert (response.status_code, error_of(response)["param"]) == (400, param)


async def test_an_unknown_session_is_404(served: Gateway) -> None:
    response = await served.client.get("/v1/sessions/other/states")
    assert (response.status_code, error_of(response)["code"]) == (404, "session_not_found")


async def test_another_models_state_is_a_mismatch() -> None:
    store = SqliteSessionStore(None)
    async with gateway(FakeBackend(), store=store) as first:
        await first.client.post("/v1/sessions", json={"id": "s1"})
        await first.client.post("/v1/sessions/s1/generate", json={"input": "Hello", "max_tokens": 2})
        async with gateway(FakeBackend(fingerprint="another"), store=store) as second:
            response = await second.client.get("/v1/sessions/s1/states")
    assert (response.status_code, error_of(response)["code"]) == (409, "state_mismatch")


async def test_a_damaged_state_is_told_until_a_turn_has_made_it_again() -> None:
    store, turn = SqliteSessionStore(None), {"input": "Hello", "max_tokens": 2}
    async with gateway(FakeBackend(), store=store) as server:
        await server.client.post("/v1/sessions", json={"id": "s1"})
        await server.client.post("/v1/sessions/s1/generate", json=turn)
        await damage_snapshot(store)
        damaged = await server.client.get("/v1/sessions/s1/states")
        assert (damaged.status_code, error_of(damaged)["code"]) == (500, "snapshot_corrupt")
        assert (await server.client.post("/v1/sessions/s1/generate", json=turn)).status_code == 200
        assert (await server.client.get("/v1/sessions/s1/states")).status_code == 200


async def test_the_last_tokens_tell_what_the_states_did(served: Gateway) -> None:
    """However much of the log is read again, and from wherever: the same figures for the same tokens."""
    for text in ("Hello there, who are you?", " I am Alice."):
        turn = {"input": text, "max_tokens": 5, "temperature": 0, "ignore_eos": True}
        assert (await served.client.post("/v1/sessions/s1/generate", json=turn)).status_code == 200
    session = (await served.client.get("/v1/sessions/s1")).json()
    plain = (await served.client.get("/v1/sessions/s1/states")).json()
    assert "recent" not in plain
    answer = (await served.client.get("/v1/sessions/s1/states", params={"recent": 8})).json()
    recent = answer.pop("recent")
    assert answer == plain
    assert (recent["position"], recent["num_tokens"]) == (session["position"] - 8, 8)
    (layer,) = recent["layers"]
    assert (layer["layer"], layer["kind"]) == ("1", "slots")
    assert 0 < layer["entropy"] <= 1 <= layer["states_per_token"] <= 8
    assert len(layer["states"]) == 8
    assert set(layer["states"][0]) == {"importance", "utilisation", "half_life", "specialisation"}
    assert sum(state["importance"] for state in layer["states"]) == pytest.approx(2 * (1 + layer["strength"]), rel=1e-3)
    assert (await served.client.get("/v1/sessions/s1")).json() == session
    whole = (await served.client.get("/v1/sessions/s1/states", params={"recent": 512})).json()["recent"]
    assert (whole["position"], whole["num_tokens"]) == (0, session["position"])


async def test_an_empty_session_has_no_last_tokens(served: Gateway) -> None:
    answer = (await served.client.get("/v1/sessions/s1/states", params={"recent": 8})).json()
    assert answer["recent"] == {"position": 0, "num_tokens": 0, "layers": []}


@pytest.mark.parametrize("recent", [-1, 513, "all"])
async def test_a_wrong_number_of_last_tokens_names_the_field(served: Gateway, recent: int | str) -> None:
    response = await served.client.get("/v1/sessions/s1/states", params={"recent": recent})
    assert (response.status_code, error_of(response)["param"]) == (400, "recent")
