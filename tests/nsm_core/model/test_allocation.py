"""Slots that come and go: what is measured of them, what is decided, and what a layer does with it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nsm_core.config import ModelConfig
from nsm_core.errors import ConfigError
from nsm_core.model.allocating import AllocatingMixer
from nsm_core.model.allocation import DECAY, AllocationRule, SlotAllocation, Tokens, follow
from nsm_core.model.nsm import NsmModel
from nsm_core.model.segments import Segments
from nsm_core.state.quantize import StateFormat, rounded_state
from tests.support.counts import scaled

SHAPE: dict[str, Any] = {
    "vocab_size": 64, "d_model": 16, "num_layers": 2, "num_heads": 2, "num_memory_slots": 8, "write_top_k": 8,
    "router": "sigmoid", "mlp_hidden": 32, "num_kv_heads": 1, "communication_interval": 64, "allocation": True,
    "start_slots": 6, "min_slots": 2, "prune_age": 1, "prune_share": 0.5, "allocate_pressure": 0.01,
}  # fmt: skip
RULE = AllocationRule(min_slots=2, prune_share=0.5, prune_age=2, allocate_pressure=0.1)


def make_use(
    importance: list[float], *, pressure: float = 0.0, age: float = 9, active: str = "11111111"
) -> SlotAllocation:
    """One row, one head."""
    mask = torch.tensor([float(letter) for letter in active])[None, None]
    values = torch.tensor(importance, dtype=torch.float64)[None, None]
    return SlotAllocation(values, torch.tensor([[pressure]]), age * mask, mask)


def make_mixer(**changes: Any) -> AllocatingMixer:
    torch.manual_seed(4)
    mixer = AllocatingMixer(ModelConfig(**{**SHAPE, **changes})).requires_grad_(False)
    mixer.initial_slots.normal_()
    mixer.out.weight.normal_()
    return mixer


def letters(mask: torch.Tensor) -> str:
    return "".join(str(int(value)) for value in mask.flatten())


@pytest.mark.parametrize("seed", range(8))
def test_first_counted_token_of_a_text_after_an_uncounted_one_overwrites_no_importance(seed: int) -> None:
    """The sums before it cancel: their rounding error must not become pressure."""
    generator = torch.Generator().manual_seed(seed)
    write, read = torch.rand(2, 1, 64, 1, 4, generator=generator)
    counted, starts = torch.ones(1, 64, dtype=torch.bool), torch.zeros(1, 64, dtype=torch.bool)
    starts[0, 62], counted[0, 62] = True, False
    use = SlotAllocation(torch.rand(1, 1, 4), torch.rand(1, 1), torch.full((1, 1, 4), 3.0), torch.ones(1, 1, 4))
    got = follow(use, Tokens(write, read, counted, starts), torch.ones(1, 1, 4, dtype=torch.bool))
    assert got.pressure.tolist() == [[0.0]]


@settings(max_examples=scaled(20, 200), deadline=None)
@given(data=st.data(), num_tokens=st.integers(1, 40), seed=st.integers(0, 99))
def test_importance_and_pressure_are_those_of_one_token_after_the_other(
    data: st.DataObject, num_tokens: int, seed: int
) -> None:
    torch.manual_seed(seed)
    write, read = torch.rand(2, 1, num_tokens, 1, 4, dtype=torch.float64)
    flags = st.lists(st.booleans(), min_size=num_tokens, max_size=num_tokens)
    counted, starts = torch.tensor([data.draw(flags)]), torch.tensor([data.draw(flags)])
    use = SlotAllocation(torch.rand(1, 1, 4), torch.rand(1, 1), torch.full((1, 1, 4), 3.0), torch.ones(1, 1, 4))
    use = SlotAllocation(*(value.double() for value in use))
    start = torch.tensor([[[True, True, False, False]]])
    got = follow(use, Tokens(write, read, counted, starts), start)
    importance, pressure, age, active = use
    for t in range(num_tokens):
        if starts[0, t]:
            importance, pressure = torch.zeros_like(importance), torch.zeros_like(pressure)
            age, active = torch.zeros_like(age), start.double()
        if counted[0, t]:
            total = importance.sum(-1)
            overwritten = (write[:, t] * importance).sum(-1) / total if total > 0 else torch.zeros_like(total)
            pressure = DECAY * pressure + (1 - DECAY) * overwritten
            importance = DECAY * importance + (1 - DECAY) * (write[:, t] + read[:, t])
    want = SlotAllocation(importance, pressure, age, active)
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("use", "after"),
    [
        pytest.param(make_use([1, 1, 0.1, 1, 1, 1, 1, 1]), "11011111", id="a weak one goes"),
        pytest.param(make_use([1, 1, 0.1, 1, 1, 1, 1, 1], age=1), "11111111", id="not a young one"),
        pytest.param(make_use([9, 0, 0, 0, 0, 0, 0, 0]), "11000000", id="never below min_slots, the highest first"),
        pytest.param(make_use([0] * 8), "11111111", id="none is weaker than the others"),
        pytest.param(make_use([1] * 8, pressure=0.2, active="10010100"), "11110100", id="two at a time, from below"),
        pytest.param(make_use([1] * 8, pressure=0.1, active="10010100"), "10010100", id="no pressure"),
        pytest.param(make_use([1, 0, 1, 1, 1, 1, 1, 1], pressure=0.2), "10111111", id="not what was just pruned"),
    ],
)
def test_boundary_prunes_and_allocates_slots(use: SlotAllocation, after: str) -> None:
    got, pruned = RULE.apply(use)
    assert letters(got.mask) == after
    assert letters(pruned) == letters(use.mask & ~got.mask)
    gone, new = ~got.mask, got.mask & ~use.mask
    assert (got.importance[gone] == 0).all()
    assert (got.age[gone | new] == 0).all()
    assert (got.importance[new] == 0).all()
    assert got.age.max() <= RULE.prune_age + 1  # so that a text may be as long as it likes


def test_slots_that_a_row_does_not_have_are_not_allocated() -> None:
    use = make_use([1] * 8, pressure=0.9, active="11000000")
    exists = torch.arange(8)[None, None] < 3
    assert letters(RULE.apply(use, exists)[0].mask) == "11100000"


def test_slots_out_of_use_are_neither_written_nor_read() -> None:
    mixer, x = make_mixer(), torch.randn(1, 40, 16)
    state = mixer.initial_state(1)
    other = {**state, "slots": state["slots"].clone()}
    other["slots"][:, :, 6:] = 100.0
    segments = Segments(torch.arange(40)[None])
    out, after = mixer(x, state, segments)
    other_out, other_after = mixer(x, other, segments)
    assert torch.equal(out, other_out)
    assert torch.equal(after["slots"][:, :, 6:], state["slots"][:, :, 6:])
    assert torch.equal(other_after["slots"][:, :, 6:], other["slots"][:, :, 6:])
    stepped, _ = mixer.step(x[:, 0], state, torch.zeros(1, dtype=torch.int64))
    torch.testing.assert_close(stepped, out[:, 0], rtol=1e-4, atol=1e-5)


def test_pruned_slots_restart_from_their_initial_value() -> None:
    mixer = make_mixer(prune_share=1.0)
    state, position = mixer.initial_state(1), 0
    for seed in range(4):
        torch.manual_seed(seed)
        before = state
        _, state = mixer(torch.randn(1, 64, 16), state, Segments(torch.arange(position, position + 64)[None]))
        position += 64
        pruned = (before["active"] > state["active"]).bool()
        assert torch.equal(state["slots"][pruned], mixer.initial_slots[None][pruned])
        assert (state["active"].sum(-1) >= 2).all()
    assert state["active"].sum() < 12


@pytest.mark.parametrize("form", [StateFormat.FP16, StateFormat.INT8])
def test_a_state_that_was_rounded_at_rest_has_the_same_slots_in_use(form: StateFormat) -> None:
    torch.manual_seed(0)
    model = NsmModel(ModelConfig(**SHAPE)).requires_grad_(False)
    _, state = model(torch.randint(64, (1, 200)), model.initial_state(1))
    layout = model.state_spec.layout()
    rounded = model.state_spec.unpack(rounded_state(layout, model.state_spec.pack(state), form))
    for layer in range(2):
        use, was = (
            SlotAllocation(*(given[f"layers.{layer}.{name}"] for name in SlotAllocation._fields))
            for given in (rounded, state)
        )
        assert torch.equal(use.mask, was.mask)
        assert torch.equal(use.age.round(), was.age)


def test_it_can_be_trained_with_fewer_slots_in_some_rows() -> None:
    """Gradients are finite, and those of slots that a row does not have are zero."""
    torch.manual_seed(1)
    model = NsmModel(ModelConfig(**{**SHAPE, "layer_pattern": "NC"}))
    for block in model.layers:
        block.mixer.out.weight.data.normal_(std=0.1)
    reset = torch.zeros(2, 4, dtype=torch.bool)
    reset[:, 0] = reset[0, 2] = True
    ids = torch.randint(64, (2, 256))
    state = model.state_spec.zeros(2)
    hidden, state = model.read(ids, state, reset=reset, num_slots=torch.tensor([3, 3]))
    model.logits(hidden).logsumexp(-1).mean().backward()
    for name, weight in model.named_parameters():
        assert weight.grad is None or weight.grad.isfinite().all(), name
    slots = model.layers[0].mixer.initial_slots.grad
    assert (slots[:, 3:] == 0).all()
    assert slots[:, :3].abs().sum() > 0
    assert (state["layers.0.active"][..., 3:] == 0).all()


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"start_slots": 1}, r"start_slots must be 0 \(all\) or min_slots \(2\)"),
        ({"min_slots": 9}, "min_slots must be 1 to num_memory_slots"),
        ({"prune_age": 0}, "prune_age"),
        ({"prune_share": 1.5}, "prune_share"),
        ({"communication_interval": 8192}, "at most 4096 with allocation"),
        ({"state_tiers": (4, 4)}, "state_tiers must be rising"),
        ({"state_tiers": (4, 8)}, "state_tiers must be rising"),
        ({"state_tiers": (1, 4)}, "at least min_slots"),
        ({"state_tiers": (4,), "layer_pattern": "NG"}, "state_tiers are of N and C layers"),
        ({"state_tiers": (4,), "layer_pattern": "W"}, "state_tiers are of N and C layers"),
    ],
)
def test_settings_that_make_no_sense_are_refused_by_name(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ModelConfig(**{**SHAPE, **wrong})
