"""Sessions over HTTP on models of every kind: two replicas on one store continue each other's turns."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from nsm_core.config import EngineConfig
from nsm_core.execution.native.executor import numerics
from nsm_core.execution.native.library import variants
from nsm_core.execution.native.precision import Precision
from nsm_core.tokenizer import Tokenizer
from service.backends.local import LocalBackend
from service.stores.sessions.base import SessionStore
from service.stores.sessions.sqlite import SqliteSessionStore
from tests.support.gateway import Gateway, gateway
from tests.support.models import RandomModel, as_loaded, random_model, small_config

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
    """States of sessions in int8."""
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


def native_backend(tokenizer: Tokenizer) -> LocalBackend:
    """Keyed slots on the native executor, several requests a step."""
    model = random_model(
        small_config(tokenizer.vocab_size, layer_pattern="KW", num_memory_slots=24, slot_width=32, window=20)
    )
    model.embedding.weight.mul_(0.3)  # or a text repeats one token for ever
    loaded = dataclasses.replace(as_loaded(model, tokenizer, fingerprint="random-keyed"), weight_format="int8")
    return LocalBackend(loaded, EngineConfig(max_slots=4, token_budget=24))


async def say_beside_others(server: Gateway, turn: int) -> str:
    """As `say`, while others' requests are in the same steps."""
    body = {"model": "random", "prompt": [3, 1, 4] * 5, "max_tokens": 12, "temperature": 1.0}
    others = [server.client.post("/v1/completions", json=body) for _ in range(2)]
    text, *responses = await asyncio.gather(say(server, turn), *others)
    assert [response.status_code for response in responses] == [200, 200]
    return text


@pytest.mark.skipif(not variants(), reason="there is no C++ compiler")
async def test_P4_keyed_sessions_on_the_native_executor_move_between_busy_replicas(
    tiny_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    backend = native_backend(tiny_tokenizer)
    assert backend.model.numerics == numerics(Precision.INT8)
    async with gateway(backend) as one:
        await create(one)
        texts = [await say(one, turn) for turn in range(3)]
    path = tmp_path / "sessions.db"
    async with (
        gateway(native_backend(tiny_tokenizer), store=SqliteSessionStore(path)) as first,
        gateway(native_backend(tiny_tokenizer), store=SqliteSessionStore(path)) as second,
    ):
        await create(first)
        assert [await say_beside_others((first, second)[turn % 2], turn) for turn in range(3)] == texts
    assert len(set(texts)) > 1
