"""Two ways, one truth: any split, any batch, padded or not, resumed or not, the logits and the state are the same."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nsm_core.config import ModelConfig
from nsm_core.layer_pattern import BASELINE_KINDS, LAYER_KINDS, parse_layer_pattern
from nsm_core.model.attention import rotary, rotate
from nsm_core.model.nsm import NsmModel
from nsm_core.model.registry import MIXERS
from nsm_core.ops.slot_scan.chunked import CHUNK_LEN
from nsm_core.state.layout import TensorLayout
from nsm_core.state.quantize import StateFormat, rounded_state
from nsm_core.state.spec import State
from tests.counts import scaled

FP32_TOLERANCE = 2e-4  # docs/model.md, "Tolerances"
FP64_TOLERANCE = 1e-10
CONFIG = ModelConfig(
    vocab_size=300, d_model=32, num_layers=3, num_heads=2, num_memory_slots=16, write_top_k=4, mlp_hidden=64,
    timescale_groups=4, num_kv_heads=1, window=24, max_context=80,
)  # fmt: skip
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
    "baselines without attention": {"layer_pattern": "lrm"},
    "state spaces": {"layer_pattern": "ds", "num_layers": 2},
    "baselines like attention": {"layer_pattern": "fp", "num_layers": 2},
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


@pytest.fixture(scope="module", params=KINDS)
def model(request: pytest.FixtureRequest) -> NsmModel:
    """Windows shorter than the texts: their edges are met in every test."""
    return make_model(with_fields(**KINDS[request.param]))


@pytest.fixture(scope="module")
def pulse() -> NsmModel:
    return make_model()


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


@settings(max_examples=scaled(15, 300))
@given(cuts=st.sets(st.integers(1, 149), max_size=8), seed=st.integers(0, 99))
def test_R7_any_split_gives_the_same_logits_and_state(model: NsmModel, cuts: set[int], seed: int) -> None:
    ids = random_ids(1, 150, seed)
    edges = [0, *sorted(cuts), 150]
    parts = [ids[:, start:end] for start, end in itertools.pairwise(edges)]
    assert_same(read(model, parts, model.initial_state(1)), read(model, [ids], model.initial_state(1)))


@pytest.mark.parametrize("kind", KINDS)
def test_splits_agree_to_rounding_in_fp64(kind: str) -> None:
    model = make_model(with_fields(**KINDS[kind])).double()
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


@settings(max_examples=scaled(15, 300))
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


def test_R10_resume_from_packed_bytes_goes_on_exactly(model: NsmModel) -> None:
    ids = random_ids(2, 90)
    _, state = model(ids[:, :60], model.initial_state(2))
    want = read(model, [ids[1:2, 60:]], {name: value[1:2] for name, value in state.items()})
    unpacked = model.state_spec.unpack(model.state_spec.pack(state, row=1))
    got = read(model, [ids[1:2, 60:]], unpacked)
    assert torch.equal(got[0], want[0])
    assert all(torch.equal(got[1][name], want[1][name]) for name in want[1])


@pytest.mark.parametrize(("form", "tolerance"), [(StateFormat.FP16, 0.002), (StateFormat.INT8, 0.1)])
def test_a_state_that_was_parked_goes_on_about_as_before(model: NsmModel, form: StateFormat, tolerance: float) -> None:
    """Half precision and int8 are for states at rest: rounded once, and not again by being stored again."""
    ids = random_ids(1, 90)
    _, state = model(ids[:, :60], model.initial_state(1))
    spec = model.state_spec
    layout = [TensorLayout(one.name, one.shape, str(one.dtype).removeprefix("torch.")) for one in spec.tensors]
    raw = spec.pack(state)
    parked = rounded_state(layout, raw, form)
    assert rounded_state(layout, parked, form) == parked
    want, _ = model(ids[:, 60:], state)
    got, after = model(ids[:, 60:], spec.unpack(parked))
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


def baseline_numbers() -> dict[str, int]:
    """Numbers in a state of each baseline, from what docs/family.md says of their shapes."""
    d, heads, slots, width = CONFIG.d_model, CONFIG.num_heads, CONFIG.num_memory_slots, CONFIG.head_dim
    linformer = (16 * (CONFIG.max_context // 64) + 64) * 2 * d
    mamba2 = 2 * d * slots + 3 * (2 * d + 2 * slots)
    return {
        "l": 2 * d, "f": linformer, "p": heads * 2 * slots * (width + 1), "r": d * width + d, "m": mamba2,
        "d": 2 * d * slots, "s": d,
    }  # fmt: skip


def test_the_spec_tells_names_shapes_and_bytes(model: NsmModel) -> None:
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
    numbers |= baseline_numbers()
    plans = parse_layer_pattern(model.config.layer_pattern)
    layers = [plans[layer % len(plans)] for layer in range(model.config.num_layers)]
    assert model.state_spec.num_bytes == 8 + 4 * sum(numbers[kind] for plan in layers for kind in plan.kinds)
    assert len(model.state_spec.pack(state)) == model.state_spec.num_bytes


def test_the_registry_knows_every_kind_of_layer() -> None:
    assert set(MIXERS) == set(LAYER_KINDS + BASELINE_KINDS)


def test_attention_does_not_look_past_its_window() -> None:
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


def test_slots_stay_in_the_hull_of_what_was_written(pulse: NsmModel) -> None:
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
    moved = -torch.expm1(router(x * (1 + 1e-6)))
    assert (write - moved).abs().max() < 1e-4
    assert ((write > 0).sum(-1) <= CONFIG.write_top_k).all()


def test_all_slots_may_be_written() -> None:
    model = make_model(with_fields(write_top_k=CONFIG.num_memory_slots))
    write = -torch.expm1(model.layers[0].mixer.router(torch.randn(5, CONFIG.d_model)))
    assert (write > 0).all()
    ids = random_ids(1, 80)
    assert_same(
        read(model, list(ids.split(9, dim=1)), model.initial_state(1)), read(model, [ids], model.initial_state(1))
    )


@pytest.mark.parametrize("num_prompts", [scaled(8, 64)])
def test_R8_greedy_tokens_are_the_same_in_every_form(model: NsmModel, num_prompts: int) -> None:
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
