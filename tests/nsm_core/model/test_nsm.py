"""The model with every kind of layer: the suite of recurrences, and what is particular to a kind."""

from __future__ import annotations

import pytest
import torch

from nsm_core.layer_pattern import LAYER_KINDS, parse_layer_pattern
from nsm_core.model.attention import rotary, rotate
from nsm_core.model.nsm import NsmModel
from nsm_core.model.registry import MIXERS
from tests.nsm_core.model.recurrence_suite import *  # noqa: F403  the suite runs here
from tests.nsm_core.model.recurrence_suite import CONFIG, assert_same, make_model, random_ids, read, with_fields

SIGMOID = {"router": "sigmoid", "write_top_k": CONFIG.num_memory_slots}
# slots that come and go within the texts of these tests
ALLOCATING = SIGMOID | {
    "allocation": True, "num_layers": 2, "communication_interval": 64, "start_slots": 12, "min_slots": 3,
    "prune_age": 1, "prune_share": 0.8, "allocate_pressure": 0.003,
}  # fmt: skip
KINDS: dict[str, dict[str, object]] = {
    **{pattern: {"layer_pattern": pattern} for pattern in ("N", "W", "A", "NWA")},
    "sigmoid": SIGMOID,
    "two levels": {
        "layer_pattern": "CN",
        "num_layers": 2,
        "communication_interval": 64,
        "upper_slots": 4,
        "projector": "hybrid",
    },
    "memory": {"layer_pattern": "M", "num_layers": 1, "gate_chunk": 8, "memory_rows": 12, "memory_width": 16},
    "memory beside slots": {
        "layer_pattern": "N(NM)",
        "num_layers": 2,
        "gate_chunk": 16,
        "memory_rows": 12,
        "memory_width": 16,
    },
    "keyed": {"layer_pattern": "KW", "slot_width": 24},
    "keyed beside slots": {"layer_pattern": "KN", "num_layers": 2},
    "direct": {"projector": "direct", "num_layers": 2},
    "hybrid read, communicating": {
        "projector": "hybrid",
        "layer_pattern": "NC",
        "num_layers": 2,
        "communication_interval": 64,
    },
    "lstm": {"layer_pattern": "G", "gate": "lstm", "gate_chunk": 16, "num_layers": 2},
    "gru, every token": {"layer_pattern": "G", "gate_chunk": 1, "num_layers": 1},
    "communicating": {"layer_pattern": "C", "num_layers": 2, "communication_interval": 64, "communication_top_k": 3},
    "allocating": ALLOCATING | {"layer_pattern": "N"},
    "allocating, sparse, communicating": ALLOCATING
    | {"layer_pattern": "C", "router": "softmax", "write_top_k": 3, "communication_top_k": 3, "start_slots": 6},
    "parallel": {"layer_pattern": "[NW]", "num_layers": 2},
    "in sequence": {"layer_pattern": "(WNL)", "num_layers": 1},
    "free, hybrid": {"layer_pattern": "NGW", "gate": "free", "gate_chunk": 32},
}


# Others have their layers, and more
IN_OTHERS = {"N", "W", "A", "communicating", "memory", "keyed beside slots", "allocating"}
PARAMS = [pytest.param(kind, marks=[pytest.mark.slow] * (kind in IN_OTHERS)) for kind in KINDS]


@pytest.fixture(scope="module", params=PARAMS)
def model(request: pytest.FixtureRequest) -> NsmModel:
    """Windows shorter than the texts: their edges are met in every test."""
    return make_model(with_fields(**KINDS[request.param]))


@pytest.fixture(scope="module")
def pulse() -> NsmModel:
    return make_model()


def test_state_spec_has_names_shapes_and_bytes(model: NsmModel) -> None:
    state = model.initial_state(3)
    assert {t.name: (3, *t.shape) for t in model.state_spec.tensors} == {n: tuple(v.shape) for n, v in state.items()}
    parts = 1 if model.config.projector == "direct" else 2  # values alone, or keys beside them
    slots = parts * CONFIG.num_memory_slots * CONFIG.d_model + 3 * (2 * parts - 1) * CONFIG.d_model
    kv_width = 2 * CONFIG.num_kv_heads * CONFIG.head_dim
    banks = 3 if model.config.gate == "lstm" else 2  # slots, sums and cells
    gated = (banks * CONFIG.num_memory_slots + 2 * model.config.gate_chunk + 9) * CONFIG.d_model
    gated += CONFIG.num_heads * CONFIG.num_memory_slots
    if model.config.allocation:  # importance, age and mask of every slot, pressure of every head
        slots += CONFIG.num_heads * (3 * CONFIG.num_memory_slots + 1)
    numbers = {"N": slots, "C": slots, "G": gated, "L": CONFIG.d_model}
    rows, width, heads = (getattr(model.config, f"memory_{name}") for name in ("rows", "width", "heads"))
    numbers |= {"M": (rows + heads) * (width + 1)}
    numbers |= {"W": CONFIG.window * kv_width, "A": CONFIG.max_context * kv_width}
    inner = CONFIG.num_heads * (model.config.slot_width or CONFIG.head_dim)
    numbers |= {"K": CONFIG.num_memory_slots * inner + 3 * (CONFIG.num_heads * CONFIG.num_memory_slots + inner)}
    plans = parse_layer_pattern(model.config.layer_pattern)
    layers = [plans[layer % len(plans)] for layer in range(model.config.num_layers)]
    assert model.state_spec.num_bytes == 8 + 4 * sum(numbers[kind] for plan in layers for kind in plan.kinds)
    assert len(model.state_spec.pack(state)) == model.state_spec.num_bytes


def test_the_registry_knows_every_kind_of_layer() -> None:
    assert set(MIXERS) == set(LAYER_KINDS)


def test_attention_ends_at_its_window() -> None:
    """Three layers of window 24 reach 72 tokens back: what lies further has no effect, what lies nearer has."""
    model = make_model(with_fields(layer_pattern="W"))
    ids = random_ids(1, 120)
    for changed, is_seen in ((119 - 72, True), (119 - 73, False)):
        other = ids.clone()
        other[0, changed] = (other[0, changed] + 1) % CONFIG.vocab_size
        hidden = [model(text, model.initial_state(1))[0][0, -1] for text in (ids, other)]
        assert torch.equal(*hidden) != is_seen


def test_rotary_scores_depend_on_the_distance_alone() -> None:
    q, k = torch.randn(2, 1, 1, 16, generator=torch.Generator().manual_seed(3))
    scores = []
    for start in (0, 1_000_000):
        rotated = [rotate(x, *rotary(torch.tensor([start + at]), 16, 10000.0)) for x, at in ((q, 40), (k, 3))]
        scores.append((rotated[0] * rotated[1]).sum())
    torch.testing.assert_close(scores[0], scores[1], rtol=1e-4, atol=1e-4)


def test_slots_stay_in_the_hull_of_written_values(pulse: NsmModel) -> None:
    """Convex writes: no value of a bank grows past the largest one that was ever written or there at the start."""
    state = pulse.initial_state(1)
    for seed in range(20):
        _, state = pulse(random_ids(1, 100, seed), state)
    head_dim = CONFIG.head_dim
    for layer in range(CONFIG.num_layers):
        keys = state[f"layers.{layer}.slots"][..., :head_dim]
        start = pulse.layers[layer].mixer.initial_slots[..., :head_dim].abs().max()
        assert keys.abs().max() <= max(float(start), head_dim**0.5) + 1e-4  # a normed key is at most sqrt(K) long


def test_routing_is_continuous_at_a_tie(pulse: NsmModel) -> None:
    """Noise of a GEMM's last bits must not move the written slots: the marginal slot fades in from zero."""
    router = pulse.layers[0].mixer.router
    x = torch.randn(4096, CONFIG.d_model)
    write = -torch.expm1(router(x))
    perturbed = -torch.expm1(router(x * (1 + 1e-6)))
    assert (write - perturbed).abs().max() < 1e-4
    assert ((write > 0).sum(-1) <= CONFIG.write_top_k).all()


def test_all_slots_may_be_written() -> None:
    model = make_model(with_fields(write_top_k=CONFIG.num_memory_slots))
    write = -torch.expm1(model.layers[0].mixer.router(torch.randn(5, CONFIG.d_model)))
    assert (write > 0).all()
    ids = random_ids(1, 80)
    assert_same(
        read(model, list(ids.split(9, dim=1)), model.initial_state(1)), read(model, [ids], model.initial_state(1))
    )
