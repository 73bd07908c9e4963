"""The decode kernels against the layers as they are written, in fp32: odd shapes, padding, rows out of order."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from nsm_core.config import ModelConfig
from nsm_core.model.nsm import NsmModel
from nsm_core.state.spec import POSITION, State
from tests.support.models import random_model

linear_kernel = pytest.importorskip("nsm_core.execution.cuda.kernels.linear", reason="the compiler is not installed")
from benchmarks.gpu_decode_checks import stream_of  # noqa: E402  imports the compiler
from nsm_core.execution.cuda.decode import NO_ROW, DecodeStep  # noqa: E402
from nsm_core.execution.cuda.kernels.linear import make_stream  # noqa: E402
from nsm_core.execution.cuda.weights import pack_weights  # noqa: E402

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOLERANCE = 1e-5  # relative; fp32 sums in another order, products of a GPU in three parts
POOL_ROWS = 7
CONFIG = ModelConfig(
    vocab_size=40,
    d_model=64,
    num_layers=1,
    num_heads=2,
    num_memory_slots=16,
    write_top_k=16,
    router="sigmoid",
    mlp_hidden=80,
    num_kv_heads=1,
    window=24,
)


def relative_error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm().clamp(min=1e-30))


@pytest.mark.parametrize("is_gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize(("rows", "outputs", "width"), [(1, 16, 64), (63, 33, 20), (64, 32, 65), (65, 100, 130)])
def test_a_linear_layer_with_norm_bias_and_gate(rows: int, outputs: int, width: int, is_gated: bool) -> None:
    depth = linear_kernel.padded(width)
    weight = torch.zeros(outputs * (1 + is_gated), depth, device=DEVICE)
    weight[:, :width] = torch.randn(len(weight), width, device=DEVICE) * width**-0.5
    bias = None if is_gated else torch.randn(outputs, device=DEVICE)
    linear = linear_kernel.Linear(weight, width, is_normed=True, is_gated=is_gated, bias=bias, eps=1e-3)
    x = torch.zeros(rows, depth, device=DEVICE)
    x[:, :width] = torch.randn(rows, width, device=DEVICE)
    out = torch.full((rows, outputs + 3), torch.nan, device=DEVICE)
    linear_kernel.run_linear(linear, stream_of(x, torch.float32), out)
    want = torch.nn.functional.rms_norm(x[:, :width].double(), (width,), eps=1e-3) @ weight[:, :width].double().T
    if is_gated:
        want = torch.nn.functional.silu(want[:, :outputs]) * want[:, outputs:]
    assert relative_error(out[:, :outputs], want if bias is None else want + bias) < TOLERANCE
    assert bool(out[:, outputs:].isnan().all())


def test_linear_layer_adds_to_the_stream_in_every_layout() -> None:
    weight, x = torch.randn(64, 64, device=DEVICE) / 8, torch.randn(5, 64, device=DEVICE)
    before = torch.randn(5, 64, device=DEVICE)
    stream = make_stream(5, 64, torch.float16, DEVICE)
    stream.full.copy_(before)
    linear_kernel.run_linear(linear_kernel.Linear(weight, 64), x, stream)
    assert relative_error(stream.full, before + x @ weight.T) < TOLERANCE
    assert stream.low.equal(stream.full.half())
    torch.testing.assert_close(stream.squares.sum(dim=1), stream.full.square().sum(dim=1))
    assert torch.cat((stream.high, stream.rest)).equal(linear_kernel.split(stream.full))


def test_a_split_weight_multiplies_as_the_whole_one() -> None:
    weight, x = torch.randn(20, 64, device=DEVICE) / 8, torch.randn(70, 64, device=DEVICE)
    halves = linear_kernel.split(weight)
    assert torch.equal(halves[:20] + halves[20:], weight)
    assert not bool((halves[:20].view(torch.int32) & 0x1FFF).any())  # ten bits after the point: what TF32 has
    out = torch.full((70, 20), torch.nan, device=DEVICE)
    linear_kernel.run_linear(linear_kernel.Linear(halves, 64, is_split=True), stream_of(x, torch.float32), out)
    assert relative_error(out, x.double() @ weight.double().T) < 1e-6


def random_state(model: NsmModel, positions: list[int]) -> State:
    """After texts of these lengths: what no token of a text has filled in a ring reads as NaN."""
    state = model.initial_state(len(positions))
    state[POSITION] = torch.tensor(positions, device=DEVICE)
    for name, value in state.items():
        if name != POSITION:
            state[name] = value + 0.5 * torch.randn_like(value)
    return state


def with_unread_rows(state: State, window: int) -> State:
    """For the kernel alone: the written form multiplies the places that no token has filled by 0."""
    is_filled = torch.arange(window, device=DEVICE) < state[POSITION][:, None]
    return {
        name: torch.where(is_filled[:, None, None, :, None], value, torch.nan) if name.endswith("kv") else value
        for name, value in state.items()
    }


def check_block(config: ModelConfig, positions: list[int]) -> None:
    """One block, on rows out of order in a batch with padding; the rest of the pool stays as it was."""
    model = random_model(config).to(DEVICE)
    state = random_state(model, positions)
    rows = [5, 1, 6, 3, 0][: len(positions)]
    pool = model.state_spec.zeros(POOL_ROWS, DEVICE)
    for name, tensor in pool.items():
        tensor.fill_(-7 if name == POSITION else torch.nan)
        tensor[rows] = with_unread_rows(state, config.window)[name]
    before = {name: tensor.clone() for name, tensor in pool.items()}
    batch = len(rows) + 2
    step = DecodeStep(pack_weights(model, torch.float32), config, pool, batch)
    step.inputs(batch).fill_(NO_ROW)
    ids = torch.randint(config.vocab_size, (len(rows),))
    step.inputs(batch)[:, 1 : 1 + len(rows)] = torch.stack((torch.tensor(rows), ids))
    carried = {name.removeprefix("layers.0."): value for name, value in state.items() if name != POSITION}
    x = model.embedding(ids.to(DEVICE)) * config.d_model**0.5
    want, want_state = model.layers[0].step(x, carried, state[POSITION])

    on = step.buffers(batch)
    step.begin(on)
    step.block(0, on)

    assert relative_error(on.x.full[1 : 1 + len(rows), : config.d_model], want) < TOLERANCE
    assert pool[POSITION][rows].equal(state[POSITION] + 1)
    for name, value in want_state.items():
        got = pool[f"layers.0.{name}"][rows]
        is_known = ~got.isnan()  # places of a ring that nothing was written to
        assert relative_error(got[is_known], value[is_known]) < TOLERANCE, name
        assert name == "kv" or bool(is_known.all())
    others = [row for row in range(POOL_ROWS) if row not in rows]
    for name, tensor in pool.items():
        assert tensor[others].view(torch.int32).equal(before[name][others].view(torch.int32)), name


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, for exponentials of padding
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"router": "softmax", "write_top_k": 4},
        {"router": "softmax", "write_top_k": 16},
        {"num_memory_slots": 12, "write_top_k": 12, "conv_taps": 2, "d_model": 40},
        {"num_memory_slots": 24, "router": "softmax", "write_top_k": 3, "conv_taps": 5, "num_heads": 4},
    ],
    ids=["sigmoid", "softmax", "softmax-all", "odd-sizes", "odd-sizes-softmax"],
)
def test_a_block_with_slot_memory(changes: dict[str, object]) -> None:
    check_block(dataclasses.replace(CONFIG, **changes), [0, 3, 100])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    "changes",
    [{}, {"window": 64, "num_kv_heads": 2}, {"window": 130, "num_heads": 4, "d_model": 40}],
    ids=["one-piece", "no-groups", "three-pieces"],
)
def test_a_block_with_a_window(changes: dict[str, int]) -> None:
    """Texts that are empty, shorter than the window, as long as it, longer, and of a million tokens."""
    window = changes.get("window", CONFIG.window)
    config = dataclasses.replace(CONFIG, layer_pattern="W", **changes)
    check_block(config, [0, window // 2, window, window + 5, 1_000_003])


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"slot_width": 64},  # wider than the model
        {"num_memory_slots": 12, "write_top_k": 12, "slot_width": 24, "conv_taps": 2, "d_model": 40},
    ],
    ids=["as-heads", "wide", "odd-sizes"],
)
def test_a_block_with_keyed_slots(changes: dict[str, object]) -> None:
    check_block(dataclasses.replace(CONFIG, layer_pattern="K", **changes), [0, 3, 100])


def test_a_write_is_clamped_as_the_router_clamps_it() -> None:
    model = random_model(CONFIG).to(DEVICE)
    model.layers[0].mixer.get_parameter("router.logits.bias").fill_(30.0)
    pool = model.initial_state(1)
    want_state = {name: value.clone() for name, value in pool.items()}
    step = DecodeStep(pack_weights(model, torch.float32), CONFIG, pool, 1)
    step.inputs(1)[:, 0] = torch.tensor([0, 3])
    _, want_state = model.step(torch.tensor([3], device=DEVICE), want_state)
    step.run(1)
    torch.testing.assert_close(pool["layers.0.slots"], want_state["layers.0.slots"], rtol=1e-5, atol=1e-6)


def test_a_nan_in_a_row_stays_in_that_row() -> None:
    model = random_model(CONFIG).to(DEVICE)
    pool = model.initial_state(3)
    pool["layers.0.slots"][1, 0, 2, 5] = torch.nan
    step = DecodeStep(pack_weights(model, torch.float32), CONFIG, pool, 3)
    step.inputs(3)[:, :3] = torch.tensor([[0, 1, 2], [4, 4, 4]])
    step.run(3)
    assert step.buffers(3).hidden.isnan().any(dim=1).tolist() == [False, True, False]
