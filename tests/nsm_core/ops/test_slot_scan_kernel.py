"""The slot scan's kernels against the token-by-token form in fp64: outputs, states and every gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from nsm_core.ops.slot_scan.chunked import LOG_DECAY_MIN, slot_scan_chunked
from nsm_core.ops.slot_scan.inputs import ScanInputs
from nsm_core.ops.slot_scan.operator import CHECKED_SIZES, fits_shared_memory, is_supported, slot_scan_kernel
from nsm_core.ops.slot_scan.reference import slot_scan_reference

pytest.importorskip("triton", reason="the kernels' compiler is not installed")

# The interpreter's NumPy tells what a GPU does in silence: masked pairs may overflow, and sums of them to both sides
# have no value; a poisoned state is NaN. Whether a product warns depends on the processor that NumPy's library runs on.
pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered in matmul:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning"),
]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FP32_TOLERANCE, FP32_GRADIENT_TOLERANCE = 1e-5, 1e-4
BF16_TOLERANCE, BF16_GRADIENT_TOLERANCE = 1e-2, 3e-2
HEADS, SLOTS, HEAD_DIM = 2, 16, 32  # small: the interpreter takes milliseconds an instruction

Inputs = dict[str, Tensor]
Scan = Callable[..., tuple[Tensor, Tensor]]


def make_inputs(
    batch: int,
    num_tokens: int,
    *,
    heads: int = HEADS,
    slots: int = SLOTS,
    head_dim: int = HEAD_DIM,
    num_states: int = 0,
) -> Inputs:
    q, k, v = torch.randn(3, batch, num_tokens, heads, head_dim, device=DEVICE).unbind(0)
    return {
        "q": q,
        "k": k,
        "v": v,
        "log_decay": LOG_DECAY_MIN * torch.rand(batch, num_tokens, heads, slots, device=DEVICE) ** 6,
        "scale": (torch.rand(heads, device=DEVICE) + 0.5) * head_dim**-0.5,
        "state": torch.randn(num_states or batch, heads, slots, 2 * head_dim, device=DEVICE),
    }


def results(scan: Scan, inputs: Inputs, tangents: tuple[Tensor, Tensor]) -> Inputs:
    """Output, final state and gradients, by name."""
    leaves = {name: x.detach().clone().requires_grad_(x.is_floating_point()) for name, x in inputs.items()}
    out, state = scan(ScanInputs(**leaves))
    wanted = {name: x for name, x in leaves.items() if x.requires_grad}
    d_out, d_state = tangents[0].to(out.dtype), tangents[1].to(state.dtype)
    gradients = torch.autograd.grad((out, state), list(wanted.values()), (d_out, d_state))
    return {"out": out.detach(), "state": state.detach()} | {
        f"d_{name}": x for name, x in zip(wanted, gradients, strict=True)
    }


def errors(inputs: Inputs, exact: Scan = slot_scan_reference) -> dict[str, float]:
    """Relative to each tensor's norm in fp64, and for gradients to a hundredth of the largest one's at least."""
    tangents = torch.randn_like(inputs["q"]), torch.randn_like(inputs["state"])
    got = results(slot_scan_kernel, inputs, tangents)
    doubled = {name: x.double() if x.is_floating_point() else x for name, x in inputs.items()}
    want = results(exact, doubled, tangents)
    floor = 0.01 * max(float(want[name].norm()) for name in ("d_q", "d_k", "d_v"))
    sizes = {name: max(float(x.norm()), floor if name.startswith("d_") else 0.0) for name, x in want.items()}
    return {name: float((got[name].double() - x).norm()) / sizes[name] for name, x in want.items()}


def assert_close(inputs: Inputs, **kwargs: Any) -> None:
    for name, error in errors(inputs, **kwargs).items():
        assert error < (FP32_GRADIENT_TOLERANCE if name.startswith("d_") else FP32_TOLERANCE), (name, error)


@pytest.mark.parametrize(("batch", "num_tokens"), [(2, 1), (1, 64), (2, 65), (1, 150)])
def test_R8_kernels_equal_reference(batch: int, num_tokens: int) -> None:
    assert_close(make_inputs(batch, num_tokens))


@pytest.mark.parametrize(("slots", "head_dim"), [(64, 64), (32, 32), (16, 64), (128, 32)])
def test_kernels_take_every_size(slots: int, head_dim: int) -> None:
    assert_close(make_inputs(1, 70, heads=1, slots=slots, head_dim=head_dim))


def test_steepest_decays_stay_exact() -> None:
    inputs = make_inputs(1, 128, heads=1)
    assert_close({**inputs, "log_decay": torch.full_like(inputs["log_decay"], LOG_DECAY_MIN)})


def test_decays_that_stop_halfway_through_a_chunk_stay_exact() -> None:
    """Factors reach their largest and smallest values in one chunk, and what is written late must survive."""
    inputs = make_inputs(1, 128, heads=1)
    steep = (torch.arange(128, device=DEVICE) % 64 < 40)[:, None, None] & (torch.arange(SLOTS, device=DEVICE) % 2 == 0)
    assert_close({**inputs, "log_decay": torch.where(steep, LOG_DECAY_MIN, inputs["log_decay"] / 100)})


def test_a_document_start_forgets_everything_before_it() -> None:
    inputs = make_inputs(2, 192, heads=1)
    inputs["reset"] = torch.tensor([[True, False, True], [False, True, False]], device=DEVICE)
    inputs["initial"] = torch.randn(1, SLOTS, 2 * HEAD_DIM, device=DEVICE)
    assert_close(inputs)
    poisoned = {**inputs, "state": torch.full_like(inputs["state"], torch.nan)}
    out, state = slot_scan_kernel(ScanInputs(**poisoned))
    assert out[0].isfinite().all()
    assert state[0].isfinite().all()
    tangents = torch.randn_like(out), torch.randn_like(state)
    assert not results(slot_scan_kernel, inputs, tangents)["d_state"][0].any()


def test_read_bias_and_inactive_slots() -> None:
    inputs = make_inputs(2, 40)
    inputs["read_bias"] = torch.randn_like(inputs["log_decay"])
    inputs["active"] = torch.rand(2, HEADS, SLOTS, device=DEVICE) < 0.6
    assert_close(inputs)
    assert_close({**inputs, "active": inputs["active"][0]})
    _, state = slot_scan_kernel(ScanInputs(**inputs))
    assert state[~inputs["active"]].equal(inputs["state"][~inputs["active"]])


def test_sequences_end_to_end_are_sequences_alone() -> None:
    lengths = torch.tensor([0, 1, 64, 0, 70], device=DEVICE)
    inputs = make_inputs(1, 135, heads=1, num_states=4)
    inputs["cu_seqlens"] = lengths.cumsum(0)
    inputs["active"] = torch.rand(4, 1, SLOTS, device=DEVICE) < 0.6
    assert_close(inputs)


def test_gradients_are_the_same_bits_every_time() -> None:
    inputs = make_inputs(1, 70)
    tangents = torch.randn_like(inputs["q"]), torch.randn_like(inputs["state"])
    first, second = (results(slot_scan_kernel, inputs, tangents) for _ in range(2))
    assert all(first[name].equal(second[name]) for name in first)


def test_an_unused_final_state_needs_no_gradient() -> None:
    inputs = make_inputs(1, 70, heads=1)
    leaves = {name: x.requires_grad_() for name, x in inputs.items()}
    out, _ = slot_scan_kernel(ScanInputs(**leaves))
    got = torch.autograd.grad(out.sum(), leaves["log_decay"])[0]
    want = torch.autograd.grad(slot_scan_chunked(ScanInputs(**leaves))[0].sum(), leaves["log_decay"])[0]
    assert float((got - want).norm() / want.norm()) < FP32_GRADIENT_TOLERANCE


def test_operator_is_whole_under_compile_and_runs_in_inference_mode() -> None:
    inputs = make_inputs(1, 40, heads=1)
    tangents = torch.randn_like(inputs["q"]), torch.randn_like(inputs["state"])
    want = results(slot_scan_kernel, inputs, tangents)
    got = results(torch.compile(slot_scan_kernel, fullgraph=True, backend="aot_eager"), inputs, tangents)
    assert all(got[name].equal(want[name]) for name in want)
    with torch.inference_mode():
        out, state = slot_scan_kernel(ScanInputs(**inputs))
    assert out.equal(want["out"])
    assert state.equal(want["state"])


def test_shapes_known_without_running_are_those_of_the_result() -> None:
    inputs = make_inputs(1, 200, heads=1, num_states=3)
    packed = [*inputs.values(), None, None, None, None, torch.tensor([0, 1, 65, 200], device=DEVICE, dtype=torch.int32)]
    for arguments in ([*make_inputs(2, 70, heads=1).values(), *[None] * 5], packed):
        torch.library.opcheck(torch.ops.nsm.slot_scan.default, tuple(arguments), test_utils="test_faketensor")


def test_bank_larger_than_shared_memory_is_refused_and_runs_in_chunks() -> None:
    inputs = make_inputs(1, 16, heads=1, slots=128, head_dim=128)
    assert not is_supported(inputs["q"], inputs["log_decay"])
    with pytest.raises(ValueError, match=r"128 slots of 128 dimensions in torch\.float32"):
        slot_scan_kernel(ScanInputs(**inputs))
    halved = inputs["q"].to(torch.bfloat16)
    assert is_supported(halved, inputs["log_decay"])
    for dtype, sizes in CHECKED_SIZES.items():
        assert all(fits_shared_memory(slots=slots, head_dim=head_dim, dtype=dtype) for slots, head_dim in sizes)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        (torch.float32, (2, 1024, 8, 64, 64)),
        (torch.float32, (1, 2048, 8, 64, 64)),
        (torch.float32, (1, 300, 2, 128, 64)),
        (torch.float32, (1, 300, 2, 64, 128)),
        (torch.bfloat16, (2, 1024, 8, 64, 64)),
        (torch.bfloat16, (1, 2048, 8, 64, 64)),
        (torch.bfloat16, (1, 333, 2, 128, 128)),  # in fp32 its banks take more shared memory than there is
    ],
    ids=str,
)
def test_kernels_on_a_gpu(dtype: torch.dtype, shape: tuple[int, int, int, int, int]) -> None:
    batch, num_tokens, heads, slots, head_dim = shape
    inputs = make_inputs(batch, num_tokens, heads=heads, slots=slots, head_dim=head_dim)
    inputs |= {name: inputs[name].to(dtype) for name in ("q", "k", "v")}
    found = errors(inputs, exact=slot_scan_chunked)
    if dtype == torch.float32:
        value_limit, gradient_limit = FP32_TOLERANCE, FP32_GRADIENT_TOLERANCE
    else:
        value_limit, gradient_limit = BF16_TOLERANCE, BF16_GRADIENT_TOLERANCE
    for name, error in found.items():
        assert error < (gradient_limit if name.startswith("d_") else value_limit), (name, error)
