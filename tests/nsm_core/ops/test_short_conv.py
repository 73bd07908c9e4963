"""The kernels of the short convolution against the plain form in fp64: values, gradients, tails, document starts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nsm_core.ops.short_conv.conv import context_conv, short_conv
from nsm_core.ops.short_conv.reference import convolve, short_conv_reference
from nsm_core.ops.slot_scan.chunked import CHUNK_LEN
from tests.support.counts import scaled

NO_TRITON = "the kernels' compiler is not installed"
forward_kernel = pytest.importorskip("nsm_core.ops.short_conv.kernel_forward", reason=NO_TRITON)
backward_kernel = pytest.importorskip("nsm_core.ops.short_conv.kernel_backward", reason=NO_TRITON)
context_kernel = pytest.importorskip("nsm_core.ops.short_conv.kernel_context", reason=NO_TRITON)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPS = 1e-6
# relative, of fp32 arithmetic; the exponentials and divisions of a GPU are a few units off
FORWARD_TOLERANCE, GRADIENT_TOLERANCE = (1e-6, 1e-5) if DEVICE == "cpu" else (5e-6, 3e-5)
BF16_TOLERANCE = 1e-2  # outputs and what the backward pass keeps are rounded to 8 bits
LEAVES = ("qkv", "weight", "tail")
OUTPUTS = ("q", "k", "v", "new_tail")


def make_inputs(
    batch: int,
    num_tokens: int,
    *,
    heads: int = 2,
    head_dim: int = 16,
    taps: int = 4,
    dtype: torch.dtype = torch.float32,
) -> dict[str, Any]:
    """qkv is a view into wider rows, as the projection makes it."""
    width = 3 * heads * head_dim
    projected = torch.randn(batch, num_tokens, width + heads * head_dim).to(dtype)
    inputs = {
        "qkv": projected[..., :width],
        "weight": torch.randn(taps, width),
        "tail": torch.randn(batch, taps - 1, width),
    }
    return {name: value.to(DEVICE) for name, value in inputs.items()} | {"num_heads": heads, "eps": EPS}


def relative_error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want).norm() / want.norm().clamp(min=1e-30))


def specification(inputs: dict[str, Any], grads: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Values and gradients in fp64."""
    exact = inputs | {name: inputs[name].double().requires_grad_() for name in LEAVES}
    outputs = short_conv_reference(**exact)
    leaves = [exact[name] for name in LEAVES]
    d_leaves = torch.autograd.grad(outputs, leaves, [grad.double() for grad in grads])
    return [output.detach() for output in outputs], list(d_leaves)


def check(inputs: dict[str, Any], forward: float = FORWARD_TOLERANCE, gradient: float = GRADIENT_TOLERANCE) -> None:
    given_ = {"reset": None, "lengths": None} | inputs
    outputs = forward_kernel.short_conv_forward(**given_)
    grads = [torch.randn_like(output) for output in outputs]
    want, want_grads = specification(inputs, grads)
    for name, got, exact in zip(OUTPUTS, outputs, want, strict=True):
        assert relative_error(got, exact) < forward, name
    assert outputs[3].dtype == torch.float32
    d_q, d_k, d_v, d_new_tail = grads
    d_leaves = backward_kernel.short_conv_backward(**given_, d_q=d_q, d_k=d_k, d_v=d_v, d_new_tail=d_new_tail)
    for name, got, exact in zip(LEAVES, d_leaves, want_grads, strict=True):
        assert relative_error(got, exact) < gradient, name


@pytest.mark.parametrize("num_tokens", [1, 3, 5, 64, 65, 127])
def test_kernels_equal_the_reference(num_tokens: int) -> None:
    check(make_inputs(2, num_tokens, heads=1, head_dim=64))


@pytest.mark.parametrize(
    "shape",
    [{"head_dim": 24}, {"head_dim": 8, "heads": 3}, {"taps": 2}, {"taps": 7}, {"head_dim": 128, "heads": 1}],
    ids=str,
)
def test_other_shapes(shape: dict[str, int]) -> None:
    check(make_inputs(1, 70, **shape))


@settings(max_examples=scaled(4, 100))
@given(
    reset=st.lists(st.lists(st.booleans(), min_size=2, max_size=2), min_size=1, max_size=2), seed=st.integers(0, 999)
)
def test_a_document_start_cuts_the_window(reset: list[list[bool]], seed: int) -> None:
    torch.manual_seed(seed)
    inputs = make_inputs(len(reset), 2 * CHUNK_LEN, heads=1)
    starts = torch.tensor(reset, device=DEVICE)
    check(inputs | {"reset": starts})
    inputs["tail"][starts[:, 0]] = torch.nan
    q, *_ = forward_kernel.short_conv_forward(**inputs, reset=starts, lengths=None)
    assert bool(q[starts[:, 0]].isfinite().all())


@pytest.mark.parametrize("num_tokens", [2, 70])
def test_the_tail_is_taken_at_each_rows_end(num_tokens: int) -> None:
    lengths = torch.tensor([0, 1, 2, num_tokens // 2 + 1, num_tokens], device=DEVICE)
    check(make_inputs(5, num_tokens, heads=1) | {"lengths": lengths})


def test_bf16_in_memory_and_fp32_inside() -> None:
    inputs = make_inputs(1, 70, heads=1, head_dim=64, dtype=torch.bfloat16)
    check(inputs, forward=BF16_TOLERANCE, gradient=BF16_TOLERANCE)
    assert forward_kernel.short_conv_forward(**inputs, reset=None, lengths=None)[0].dtype == torch.bfloat16


def test_any_split_gives_the_same_heads_and_tail() -> None:
    inputs = make_inputs(2, 40)
    want = short_conv(**inputs)
    parts, tail = [], inputs["tail"]
    for part in inputs["qkv"].split([1, 2, 17, 20], dim=1):
        *heads, tail = short_conv(**inputs | {"qkv": part, "tail": tail})
        parts.append(heads)
    got = [torch.cat(pieces, dim=1) for pieces in zip(*parts, strict=True)]
    torch.testing.assert_close((*got, tail), want)


def test_the_operator_is_described_truly_to_the_compiler() -> None:
    """Shapes without data, autograd and schema of the operator that a compiled model calls."""
    inputs = make_inputs(2, CHUNK_LEN)
    leaves = [inputs[name].detach().requires_grad_() for name in LEAVES]
    starts, lengths = torch.tensor([[True], [False]], device=DEVICE), torch.tensor([3, CHUNK_LEN], device=DEVICE)
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    for optional in ((starts, lengths), (None, None)):
        torch.library.opcheck(torch.ops.nsm.short_conv.default, (*leaves, *optional, 2, EPS), test_utils=checks)


@pytest.mark.gpu
def test_at_full_size_on_a_gpu() -> None:
    inputs = make_inputs(4, 1024, heads=8, head_dim=64)
    check(inputs)
    half = make_inputs(4, 1024, heads=8, head_dim=64, dtype=torch.bfloat16)
    check(half, forward=BF16_TOLERANCE, gradient=BF16_TOLERANCE)
    leaves = [half[name].requires_grad_() for name in LEAVES]
    results = []
    for _ in range(2):
        q, k, v, tail = short_conv(**half)
        results.append([q, k, v, tail, *torch.autograd.grad((q * k * v).float().sum() + tail.sum(), leaves)])
    assert all(first.equal(second) for first, second in zip(*results, strict=True))


@pytest.mark.parametrize(("num_tokens", "channels", "taps"), [(1, 300, 4), (19, 64, 2), (64, 256, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_convolution_alone_has_the_bits_of_the_plain_form(
    num_tokens: int, channels: int, taps: int, dtype: torch.dtype
) -> None:
    joined = torch.randn(3, taps - 1 + num_tokens, channels + 8).to(DEVICE, dtype)[..., :channels]
    weight = torch.randn(taps, channels, device=DEVICE)
    want = convolve(joined.to(weight.dtype), weight, None)
    for to in (torch.float32, torch.bfloat16)[: 2 if DEVICE == "cuda" else 1]:  # the interpreter does not round to bf16
        assert context_kernel.convolve_rows(joined, weight, to).equal(want.to(to))


def test_the_convolution_alone_may_be_differentiated_and_begins_anew_with_a_document() -> None:
    joined = torch.randn(1, 3 + 2 * CHUNK_LEN, 4, device=DEVICE, requires_grad=True)
    weight, reset = torch.randn(4, 4, device=DEVICE), torch.tensor([[False, True]], device=DEVICE)
    found = context_conv(joined=joined, weight=weight, reset=reset, dtype=torch.float32)
    (grad,) = torch.autograd.grad(found[:, CHUNK_LEN:].sum(), joined)
    assert not grad[:, : CHUNK_LEN + 3].any()
    with torch.inference_mode():
        assert context_conv(joined=joined, weight=weight, reset=reset, dtype=torch.float32).equal(found)
