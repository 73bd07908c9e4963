"""X25: every preset, and every pattern of layers that the pages name, trains, resumes, and serves what it learned."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import math
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path

import pytest

from benchmarks.family.models import BASELINES, ENTRIES, Size, config_of
from nsm_core.config import EngineConfig, ModelConfig
from nsm_core.layer_pattern import LAYER_KINDS, parse_layer_pattern
from nsm_core.model.loader import load_checkpoint
from nsm_core.tokenizer import Tokenizer
from nsm_lab.training.config import TrainConfig
from nsm_lab.training.loop import train
from nsm_lab.training.presets import PRESETS
from service.backends.local import LocalBackend
from service.stores.sessions.sqlite import SqliteSessionStore
from tests.support.gateway import Gateway, gateway
from tests.support.samples import BOOKS_DIR

SIZE = Size(d_model=32, num_layers=4, num_heads=2, num_memory_slots=16, num_parameters=50_000, train_len=128)
NARROW = {"d_model": 32, "num_heads": 2, "num_kv_heads": 2, "mlp_hidden": 32, "memory_width": 8, "memory_rows": 8}
# Made by the tests that use them: a size is found by building a model of it, which collecting should not wait for.
MODELS: dict[str, Callable[[], ModelConfig]] = {
    **{f"preset {name}": partial(dataclasses.replace, config, **NARROW) for name, config in PRESETS.items()},
    **{f"family {name}": partial(config_of, name, SIZE, 128) for name in ENTRIES},
    # the two that the pages write out beside the tables: docs/training.md, and two levels with a window
    "pattern NW": partial(dataclasses.replace, PRESETS["base"], **NARROW, layer_pattern="NW", window=64),
    "pattern NNNCW": partial(
        dataclasses.replace, PRESETS["simple"], **NARROW, layer_pattern="NNNCW", num_layers=5, upper_slots=4
    ),
}


def is_served(config: ModelConfig) -> bool:
    """Layers of the literature are the lab's alone."""
    return all(set(plan.kinds) <= set(LAYER_KINDS) for plan in parse_layer_pattern(config.layer_pattern))


def test_X25_baselines_alone_are_not_served() -> None:
    assert {name for name, config in MODELS.items() if not is_served(config())} == {
        f"family {name}"
        for name, entry in ENTRIES.items()
        if entry.group == BASELINES and entry.layer_pattern.islower()
    }


@pytest.fixture
def run(tiny_tokenizer: Tokenizer, tmp_path: Path) -> TrainConfig:
    tiny_tokenizer.save(tmp_path / "given.json")
    return TrainConfig(
        data=BOOKS_DIR, out=tmp_path / "run", model=ModelConfig(), tokenizer=tmp_path / "given.json", device="cpu",
        steps=2, rows=4, seq_len=128, eval_every=1, eval_batches=1, save_every=1, weight_format="fp32", compile=False,
    )  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
async def test_X25_every_pattern_trains_resumes_and_serves(
    run: TrainConfig, tiny_tokenizer: Tokenizer, tmp_path: Path, name: str
) -> None:
    run = dataclasses.replace(run, model=dataclasses.replace(MODELS[name](), vocab_size=tiny_tokenizer.vocab_size))
    train(run)
    out = train(dataclasses.replace(run, steps=3, resume=True))
    rows = list(csv.DictReader((out / "log.csv").read_text("utf-8").splitlines()))
    assert [int(row["step"]) for row in rows] == [1, 2, 3]
    assert all(math.isfinite(float(row["val_loss"])) for row in rows)
    if is_served(run.model):
        unbroken = await two_turns(out, tmp_path / "one.db", is_moved=False)
        assert await two_turns(out, tmp_path / "moved.db", is_moved=True) == unbroken


async def two_turns(model: Path, sessions: Path, *, is_moved: bool) -> list[str]:
    """The texts of a session's two turns: on one server, or the second on another one that opens the same file."""
    async with served(model, sessions) as server:
        response = await server.client.post("/v1/sessions", json={"id": "s1"})
        assert response.status_code == 200, response.text
        texts = [await say(server)]
        if not is_moved:
            return [*texts, await say(server)]
    async with served(model, sessions) as server:
        return [*texts, await say(server)]


@contextlib.asynccontextmanager
async def served(model: Path, sessions: Path) -> AsyncIterator[Gateway]:
    backend = LocalBackend(load_checkpoint(model), EngineConfig(max_slots=1, token_budget=64))
    async with gateway(backend, store=SqliteSessionStore(sessions)) as server:
        yield server


async def say(server: Gateway) -> str:
    body = {"input": list(range(1, 71)), "max_tokens": 6, "temperature": 1.0, "seed": 7}
    response = await server.client.post("/v1/sessions/s1/generate", json=body)
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["text"])
