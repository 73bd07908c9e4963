"""The keyed scan's chunked form and kernels beside its equations, token by token in fp64."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nsm_core.ops.keyed_scan.chunked import keyed_scan_chunked
from nsm_core.ops.keyed_scan.operator import is_supported, keyed_scan_kernel
from nsm_core.ops.keyed_scan.reference import keyed_scan_reference

# A backward pass on a GPU runs in a thread of its own; in its first product PyTorch says that it makes a context there.
pytestmark = pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS:UserWarning")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FP32_TOLERANCE, FP32_GRADIENT_TOLERANCE = 1e-5, 1e-4
BF16_TOLERANCE, BF16_GRADIENT_TOLERANCE = 2e-2, 4e-2
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="the kernels' compiler is not installed"
)

Inputs = dict[str, Tensor]
Scan = Callable[..., tuple[Tensor, Tensor]]
VARIANTS = [
    pytest.param(keyed_scan_chunked, id="chunked"),
    pytest.param(keyed_scan_kernel, id="kernel", marks=needs_triton),
]


def make_inputs(batch: int, num_tokens: int, *, heads: int = 2, slots: int = 32, width: int = 32) -> Inputs:
    """Keys that resemble each other, as those of neighbouring tokens do, and decays of all speeds."""
    shape = (batch, num_tokens, heads)
    common = torch.randn(1, 1, heads, slots, device=DEVICE)
    return {
        "q": torch.randn(*shape, slots, device=DEVICE) * slots**-0.5,
        "k": F.normalize(torch.randn(*shape, slots, device=DEVICE) + common, dim=-1),
        "v": torch.randn(*shape, width, device=DEVICE),
        "strength": torch.rand(*shape, device=DEVICE),
        "log_decay": -2.0 * torch.rand(*shape, device=DEVICE) ** 8,
        "state": torch.randn(batch, heads, slots, width, device=DEVICE),
    }


def results(scan: Scan, inputs: Inputs, tangents: tuple[Tensor, Tensor]) -> Inputs:
    """Output, final state and gradients, by name."""
    leaves = {name: x.detach().clone().requires_grad_(x.is_floating_point()) for name, x in inputs.items()}
    out, state = scan(**leaves)
    wanted = {name: x for name, x in leaves.items() if x.requires_grad}
    d_out, d_state = tangents[0].to(out.dtype), tangents[1].to(state.dtype)
    gradients = torch.autograd.grad((out, state), list(wanted.values()), (d_out, d_state))
    named = {f"d_{name}": x for name, x in zip(wanted, gradients, strict=True)}
    return {"out": out.detach(), "state": state.detach()} | named


def errors(scan: Scan, inputs: Inputs, exact: Scan = keyed_scan_reference) -> dict[str, float]:
    """Relative to each tensor's norm in fp64."""
    tangents = torch.randn_like(inputs["v"]), torch.randn_like(inputs["state"])
    doubled = {name: x.double() if x.is_floating_point() else x for name, x in inputs.items()}
    got, want = results(scan, inputs, tangents), results(exact, doubled, tangents)
    return {name: float((got[name].double() - x).norm() / x.norm().clamp(min=1e-9)) for name, x in want.items()}


def assert_close(scan: Scan, inputs: Inputs) -> None:
    for name, error in errors(scan, inputs).items():
        assert error < (FP32_GRADIENT_TOLERANCE if name.startswith("d_") else FP32_TOLERANCE), (name, error)


@pytest.mark.parametrize("scan", VARIANTS)
@pytest.mark.parametrize(("batch", "num_tokens"), [(2, 1), (1, 64), (2, 65), (1, 150)])
def test_keyed_scan_of_any_length_equals_the_recurrence(scan: Scan, batch: int, num_tokens: int) -> None:
    assert_close(scan, make_inputs(batch, num_tokens))


@pytest.mark.parametrize("scan", VARIANTS)
def test_keyed_scan_of_unequal_widths_equals_the_recurrence(scan: Scan) -> None:
    assert_close(scan, make_inputs(1, 70, heads=1, slots=64, width=32))
    assert_close(scan, make_inputs(1, 70, heads=1, slots=32, width=64))


@pytest.mark.parametrize("scan", VARIANTS)
def test_keyed_scan_of_equal_keys_at_full_strength_stays_exact(scan: Scan) -> None:
    """The triangular system is then as far from the identity as it can be."""
    inputs = make_inputs(1, 128, heads=1)
    inputs["k"] = inputs["k"][:, :1].expand_as(inputs["k"]).contiguous()
    inputs["strength"] = torch.ones_like(inputs["strength"])
    inputs["log_decay"] = torch.zeros_like(inputs["log_decay"])
    found = errors(scan, inputs)
    assert max(found["out"], found["state"]) < FP32_TOLERANCE
    assert found["d_v"] < FP32_GRADIENT_TOLERANCE


@pytest.mark.parametrize("scan", VARIANTS)
def test_keyed_scan_at_a_document_start_forgets_everything_before_it(scan: Scan) -> None:
    inputs = make_inputs(2, 192, heads=1)
    inputs["reset"] = torch.tensor([[True, False, True], [False, True, False]], device=DEVICE)
    assert_close(scan, inputs)
    poisoned = {**inputs, "state": torch.full_like(inputs["state"], torch.nan)}
    out, state = scan(**poisoned)
    assert out[0].isfinite().all()
    assert state[0].isfinite().all()


@pytest.mark.parametrize("scan", VARIANTS)
def test_keyed_scan_of_tokens_without_strength_or_decay_keeps_the_state(scan: Scan) -> None:
    inputs = make_inputs(1, 70)
    inputs |= {name: torch.zeros_like(inputs[name]) for name in ("strength", "log_decay")}
    assert scan(**inputs)[1].equal(inputs["state"])


@needs_triton
def test_keyed_scan_gradients_are_the_same_bits_every_time() -> None:
    inputs = make_inputs(1, 70)
    tangents = torch.randn_like(inputs["v"]), torch.randn_like(inputs["state"])
    first, second = (results(keyed_scan_kernel, inputs, tangents) for _ in range(2))
    assert all(first[name].equal(second[name]) for name in first)


@needs_triton
def test_keyed_scan_operator_is_whole_under_compile() -> None:
    inputs = make_inputs(1, 40, heads=1)
    tangents = torch.randn_like(inputs["v"]), torch.randn_like(inputs["state"])
    want = results(keyed_scan_kernel, inputs, tangents)
    got = results(torch.compile(keyed_scan_kernel, fullgraph=True, backend="aot_eager"), inputs, tangents)
    assert all(got[name].equal(want[name]) for name in want)


def test_keyed_scan_kernels_take_fp32_and_bf16_of_their_widths() -> None:
    inputs = make_inputs(1, 3)
    assert is_supported(inputs["q"], inputs["v"])
    assert not is_supported(inputs["q"].double(), inputs["v"])
    assert not is_supported(inputs["q"][..., :24], inputs["v"])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "shape",
    [
        (2, 1024, 8, 128, 128),
        (1, 333, 2, 64, 64),
        (1, 2048, 4, 128, 64),
        (3, 5, 8, 128, 128),  # one chunk: built for it alone, the walk read shared memory out of bounds
    ],
    ids=str,
)
def test_keyed_scan_kernels_on_a_gpu(dtype: torch.dtype, shape: tuple[int, int, int, int, int]) -> None:
    batch, num_tokens, heads, slots, width = shape
    inputs = make_inputs(batch, num_tokens, heads=heads, slots=slots, width=width)
    inputs |= {name: inputs[name].to(dtype) for name in ("q", "k", "v")}
    is_fp32 = dtype == torch.float32
    for name, error in errors(keyed_scan_kernel, inputs, exact=keyed_scan_chunked).items():
        value, gradient = (1e-4, 1e-3) if is_fp32 else (BF16_TOLERANCE, BF16_GRADIENT_TOLERANCE)
        assert error < (gradient if name.startswith("d_") else value), (name, error)
