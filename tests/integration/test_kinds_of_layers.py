"""Sessions over HTTP on models of every kind: two replicas on one store continue each other's turns, states in int8."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from nsm_core.config import EngineConfig
from nsm_core.tokenizer import Tokenizer
from service.backends.local import LocalBackend
from service.stores.sessions.base import SessionStore
from service.stores.sessions.sqlite import SqliteSessionStore
from tests.support.gateway import Gateway, gateway
from tests.support.models import RandomModel, as_loaded

KINDS: dict[str, dict[str, Any]] = {
    "gru": {"layer_pattern": "G", "gate_chunk": 8},
    "lstm": {"layer_pattern": "G", "gate": "lstm"},
    "free gate": {"layer_pattern": "G", "gate": "free"},
    "direct read": {"projector": "direct"},
    "hybrid read": {"projector": "hybrid"},
    "two levels": {"layer_pattern": "C", "communication_interval": 64, "upper_slots": 2},
    "keyed": {"layer_pattern": "K", "slot_width": 16},
    "memory": {"layer_pattern": "N(NM)", "gate_chunk": 8, "memory_rows": 8, "memory_width": 16},
    "advanced hybrid": {"layer_pattern": "[CW]", "communication_interval": 64, "timescale_groups": 2},
    "sequential hybrid": {"layer_pattern": "(WNL)"},
}


def make_backend(tokenizer: Tokenizer, kind: str) -> LocalBackend:
    model = RandomModel(tokenizer.vocab_size, **KINDS[kind])
    # one row a step: neighbours would change the last bits
    return LocalBackend(
        as_loaded(model, tokenizer, fingerprint=f"random-{kind}"), EngineConfig(max_slots=1, token_budget=64)
    )


@contextlib.asynccontextmanager
async def replica(tokenizer: Tokenizer, store: SessionStore | None, kind: str) -> AsyncIterator[Gateway]:
    async with gateway(make_backend(tokenizer, kind), store=store, state_dtype="int8") as server:
        yield server


async def create(server: Gateway) -> None:
    response = await server.client.post("/v1/sessions", json={"id": "s1"})
    assert response.status_code == 200, response.text


async def say(server: Gateway, turn: int) -> str:
    body = {"input": list(range(1, 41 + turn)), "max_tokens": 8, "temperature": 1.0, "seed": 7}
    response = await server.client.post("/v1/sessions/s1/generate", json=body)
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["text"])


@pytest.mark.parametrize("kind", KINDS)
async def test_P4_replicas_continue_each_others_turns(tiny_tokenizer: Tokenizer, tmp_path: Path, kind: str) -> None:
    async with replica(tiny_tokenizer, None, kind) as one:
        await create(one)
        texts = [await say(one, turn) for turn in range(3)]
    path = tmp_path / "sessions.db"
    async with (
        replica(tiny_tokenizer, SqliteSessionStore(path), kind) as first,
        replica(tiny_tokenizer, SqliteSessionStore(path), kind) as second,
    ):
        await create(first)
        assert [await say((first, second)[turn % 2], turn) for turn in range(3)] == texts
        states = await second.client.get("/v1/sessions/s1/states")
        assert states.status_code == 200, states.text
        assert {layer["layer"] for layer in states.json()["layers"]} == {0, 1}
    assert len(set(texts)) > 1
