"""Two ways, one truth: any split, any batch, padded or not, resumed or not, the logits and the state are the same.

A module that imports all of this runs the tests with its own fixture `model`.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nsm_core.config import ModelConfig
from nsm_core.model.nsm import NsmModel
from nsm_core.ops.slot_scan.chunked import CHUNK_LEN
from nsm_core.state.layout import TensorLayout
from nsm_core.state.quantize import StateFormat, rounded_state
from nsm_core.state.spec import State
from tests.support.counts import scaled

FP32_TOLERANCE = 2e-4  # benchmarks/notes/model.md, "Tolerances"
FP64_TOLERANCE = 1e-10
CONFIG = ModelConfig(
    vocab_size=300, d_model=32, num_layers=3, num_heads=2, num_memory_slots=16, write_top_k=4, mlp_hidden=64,
    timescale_groups=4, num_kv_heads=1, window=24, max_context=80,
)  # fmt: skip


def make_model(config: ModelConfig = CONFIG) -> NsmModel:
    """Random weights everywhere: projections that start at zero would hide the mixer."""
    torch.manual_seed(7)
    model = NsmModel(config).eval().requires_grad_(False)
    for block in model.layers:
        for name, weight in block.named_parameters():
            if name.endswith(("out.weight", "down.weight", "mixer.weights")):
                weight.normal_(std=weight.shape[1] ** -0.5)
            if name.endswith(("initial_slots", "read_bias.logits.weight")):
                weight.normal_()
    return model


def with_fields(**fields: object) -> ModelConfig:
    return ModelConfig.from_dict({**dataclasses.asdict(CONFIG), **fields})


def random_ids(batch: int, num_tokens: int, seed: int = 0) -> Tensor:
    return torch.randint(CONFIG.vocab_size, (batch, num_tokens), generator=torch.Generator().manual_seed(seed))


def read(model: NsmModel, parts: list[Tensor], state: State) -> tuple[Tensor, State]:
    """Logits of all parts, read one after the other; single tokens go through `step`."""
    logits = []
    for part in parts:
        if part.shape[1] == 1:
            hidden, state = model.step(part[:, 0], state)
            hidden = hidden[:, None]
        else:
            hidden, state = model(part, state)
        logits.append(model.logits(hidden))
    return torch.cat(logits, dim=1), state


def assert_same(got: tuple[Tensor, State], want: tuple[Tensor, State], tolerance: float = FP32_TOLERANCE) -> None:
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("split", [1, 7, 64, 96])
def test_R7_R8_any_even_split_gives_the_same_logits_and_state(model: NsmModel, split: int) -> None:
    ids = random_ids(2, 200)
    want = read(model, [ids], model.initial_state(2))
    assert_same(read(model, list(ids.split(split, dim=1)), model.initial_state(2)), want)


@settings(max_examples=scaled(6, 300))
@given(cuts=st.sets(st.integers(1, 149), max_size=8), seed=st.integers(0, 99))
def test_R7_any_split_gives_the_same_logits_and_state(model: NsmModel, cuts: set[int], seed: int) -> None:
    ids = random_ids(1, 150, seed)
    edges = [0, *sorted(cuts), 150]
    parts = [ids[:, start:end] for start, end in itertools.pairwise(edges)]
    assert_same(read(model, parts, model.initial_state(1)), read(model, [ids], model.initial_state(1)))


def test_splits_agree_to_rounding_in_fp64(model: NsmModel) -> None:
    model = copy.deepcopy(model).double()
    ids = random_ids(1, 130)
    state = {
        name: value.double() if value.is_floating_point() else value for name, value in model.initial_state(1).items()
    }
    hidden, end = model(ids, state)
    pieces, running = [], state
    for part in ids.split(13, dim=1):
        piece, running = model(part, running)
        pieces.append(piece)
    torch.testing.assert_close((torch.cat(pieces, 1), running), (hidden, end), rtol=FP64_TOLERANCE, atol=FP64_TOLERANCE)


@settings(max_examples=scaled(6, 300))
@given(lengths=st.lists(st.integers(0, 100), min_size=1, max_size=6), seed=st.integers(0, 99))
def test_R9_right_padded_rows_equal_their_solo_runs(model: NsmModel, lengths: list[int], seed: int) -> None:
    if max(lengths) == 0:
        lengths = [*lengths, 1]
    warm = random_ids(len(lengths), 5, seed + 1000)
    _, start = model(warm, model.initial_state(len(lengths)))
    ids = random_ids(len(lengths), max(lengths), seed)
    hidden, state = model(ids, start, torch.tensor(lengths))
    for row, length in enumerate(lengths):
        own_start = {name: value[row : row + 1] for name, value in start.items()}
        own_state = {name: value[row : row + 1] for name, value in state.items()}
        if length == 0:
            assert all(torch.equal(own_state[name], own_start[name]) for name in own_state)
            continue
        want = model(ids[row : row + 1, :length], own_start)
        assert_same((hidden[row : row + 1, :length], own_state), want)


def test_R9_a_row_does_not_see_its_neighbours(model: NsmModel) -> None:
    """Not even a neighbour whose state is NaN: rows of a freed slot may hold anything."""
    ids, state = random_ids(3, 70), model.initial_state(3)
    for name, value in state.items():
        if value.is_floating_point():
            value[1] = torch.nan
            state[name] = value
    hidden, after = model(ids, state)
    stepped, _ = model.step(ids[:, 0], state)
    for row in (0, 2):
        want_hidden, want_state = model(ids[row : row + 1], model.initial_state(1))
        assert_same((hidden[row : row + 1], {n: v[row : row + 1] for n, v in after.items()}), (want_hidden, want_state))
        assert stepped[row].isfinite().all()


def test_R10_resume_from_packed_bytes_is_exact(model: NsmModel) -> None:
    ids = random_ids(2, 90)
    _, state = model(ids[:, :60], model.initial_state(2))
    want = read(model, [ids[1:2, 60:]], {name: value[1:2] for name, value in state.items()})
    unpacked = model.state_spec.unpack(model.state_spec.pack(state, row=1))
    got = read(model, [ids[1:2, 60:]], unpacked)
    assert torch.equal(got[0], want[0])
    assert all(torch.equal(got[1][name], want[1][name]) for name in want[1])


@pytest.mark.parametrize(("state_format", "tolerance"), [(StateFormat.FP16, 0.002), (StateFormat.INT8, 0.1)])
def test_stored_state_continues_with_small_differences(
    model: NsmModel, state_format: StateFormat, tolerance: float
) -> None:
    """Half precision and int8 are for states at rest: rounded once, and not again by being stored again."""
    ids = random_ids(1, 90)
    _, state = model(ids[:, :60], model.initial_state(1))
    spec = model.state_spec
    layout = [TensorLayout(one.name, one.shape, str(one.dtype).removeprefix("torch.")) for one in spec.tensors]
    raw = spec.pack(state)
    stored = rounded_state(layout, raw, state_format)
    assert rounded_state(layout, stored, state_format) == stored
    want, _ = model(ids[:, 60:], state)
    got, after = model(ids[:, 60:], spec.unpack(stored))
    assert after["position"].tolist() == [90]
    assert (got - want).norm() < tolerance * want.norm()


def test_long_prompts_are_read_in_pieces(model: NsmModel, monkeypatch: pytest.MonkeyPatch) -> None:
    ids, lengths = random_ids(2, 200), torch.tensor([200, 70])
    want = model(ids, model.initial_state(2), lengths)
    monkeypatch.setattr("nsm_core.model.nsm.SUPER_CHUNK_LEN", 64)
    got = model(ids, model.initial_state(2), lengths)
    assert_same((got[0][:1], got[1]), (want[0][:1], want[1]))


def test_the_given_state_is_not_modified(model: NsmModel) -> None:
    state = model.initial_state(1)
    before = {name: value.clone() for name, value in state.items()}
    model(random_ids(1, 40), state)
    model.step(random_ids(1, 1)[:, 0], state)
    assert all(torch.equal(state[name], before[name]) for name in before)


def test_a_peek_is_a_step_without_its_state(model: NsmModel) -> None:
    ids = random_ids(2, 9)
    _, state = model(ids[:, :-1], model.initial_state(2))
    hidden, _ = model.step(ids[:, -1], state)
    torch.testing.assert_close(model.peek(ids[:, -1], state), hidden, rtol=0, atol=0)


def test_packed_documents_do_not_leak_into_each_other(model: NsmModel) -> None:
    """The second document of a packed row reads as if it stood alone, whatever was before it."""
    second = random_ids(1, CHUNK_LEN, 5)
    alone = model.read(second, model.initial_state(1))
    for seed in (1, 2):
        first = random_ids(1, CHUNK_LEN, seed)
        packed = torch.cat((first, second), dim=1)
        reset = torch.tensor([[True, True]])
        valid = torch.ones_like(packed, dtype=torch.bool)
        valid[:, 50:CHUNK_LEN] = False  # padding between the two
        for is_fresh in (False, True):
            hidden, state = model.read(packed, model.initial_state(1), valid=valid, reset=reset, is_fresh=is_fresh)
            torch.testing.assert_close(hidden[:, CHUNK_LEN:], alone[0], rtol=FP32_TOLERANCE, atol=FP32_TOLERANCE)
            follow = random_ids(1, 30, 9)
            assert_same(model(follow, state), model(follow, alone[1]))


def test_positions_count_the_tokens_fed(model: NsmModel) -> None:
    _, state = model(random_ids(2, 50), model.initial_state(2), torch.tensor([50, 3]))
    _, state = model.step(random_ids(2, 1)[:, 0], state)
    assert state["position"].tolist() == [51, 4]


@pytest.mark.parametrize("num_prompts", [scaled(3, 64)])
def test_R8_greedy_tokens_are_the_same_in_every_implementation(model: NsmModel, num_prompts: int) -> None:
    """A fixed suite: prompts read whole, in pieces, and in one batch continue with the same tokens."""
    prompts = random_ids(num_prompts, 48, seed=11)

    def greedy(parts: list[Tensor], batch: int) -> Tensor:
        logits, state = read(model, parts, model.initial_state(batch))
        tokens = [logits[:, -1].argmax(-1)]
        for _ in range(31):
            hidden, state = model.step(tokens[-1], state)
            tokens.append(model.logits(hidden).argmax(-1))
        return torch.stack(tokens, dim=1)

    batched = greedy([prompts], num_prompts)
    for row in range(num_prompts):
        prompt = prompts[row : row + 1]
        assert torch.equal(greedy([prompt], 1)[0], batched[row])
        assert torch.equal(greedy([prompt[:, :17], prompt[:, 17:18], prompt[:, 18:]], 1)[0], batched[row])


@pytest.mark.slow
def test_R8_state_delta_stays_bounded_after_ten_thousand_tokens(model: NsmModel) -> None:
    ids = random_ids(1, 10_000)
    _, chunked = model(ids, model.initial_state(1))
    stepped = model.initial_state(1)
    for t in range(ids.shape[1]):
        _, stepped = model.step(ids[:, t], stepped)
    torch.testing.assert_close(chunked, stepped, rtol=FP32_TOLERANCE, atol=FP32_TOLERANCE)


__all__ = [name for name in globals() if name.startswith("test_")]
