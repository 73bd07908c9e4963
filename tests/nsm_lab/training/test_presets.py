"""Presets are what the documentation says they are."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from nsm_core.model.nsm import NsmModel
from nsm_lab.training.presets import PRESETS, size_of, table

MODEL_PAGE = Path(__file__).parents[3] / "benchmarks" / "notes" / "layers.md"
OF_ONE_SIZE = (
    "base",
    "hybrid",
    "sliding-window",
    "transformer",
    "simple",
    "advanced-hybrid",
    "sequential-hybrid",
    "memory-augmented",
)


def test_the_table_in_the_documentation_is_what_the_command_prints() -> None:
    assert table() in MODEL_PAGE.read_text("utf-8")


def test_presets_for_comparison_are_of_one_size() -> None:
    sizes = {name: size_of(PRESETS[name]) for name in OF_ONE_SIZE}
    counts = [size.num_parameters for size in sizes.values()]
    assert max(counts) < 1.01 * min(counts)
    hybrid = sizes["hybrid"].state_bytes
    assert 0.99 * hybrid <= sizes["sliding-window"].state_bytes <= hybrid


@pytest.mark.parametrize(("states", "millions"), [(32, 12), (64, 24), (128, 48)])
def test_names_with_a_number_have_so_many_states_and_the_literatures_size(states: int, millions: int) -> None:
    for family in ("pulse", "nsm"):
        config = PRESETS[f"{family}-{states}"]
        assert config.num_memory_slots == states
        assert config.head_dim == 64
        assert size_of(config).num_parameters / 1e6 == pytest.approx(millions, rel=0.08)


def test_doubling_the_states_alone_does_not_double_a_model() -> None:
    config = PRESETS["pulse-64"]
    twice = dataclasses.replace(config, num_memory_slots=128, write_top_k=128)
    assert size_of(twice).num_parameters < 1.15 * size_of(config).num_parameters


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_reads_and_steps(name: str) -> None:
    """At a fraction of its width: what its layers are stays."""
    config = PRESETS[name]
    small = {"vocab_size": 64, "d_model": 32, "num_heads": 2, "num_kv_heads": 2, "mlp_hidden": 32, "memory_width": 8}
    model = NsmModel(dataclasses.replace(config, **small)).eval().requires_grad_(False)
    ids = torch.randint(64, (1, 70))
    _, state = model(ids[:, :69], model.initial_state(1))
    hidden, _ = model.step(ids[:, 69], state)
    whole, _ = model(ids, model.initial_state(1))
    torch.testing.assert_close(hidden, whole[:, -1], rtol=2e-4, atol=2e-4)
