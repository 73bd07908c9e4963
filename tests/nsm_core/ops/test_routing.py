"""The routing kernels against the plain form in fp64: values, gradients, ties."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nsm_core.ops.routing.reference import routing_reference
from nsm_core.ops.routing.route import route
from nsm_core.ops.slot_scan.chunked import LOG_DECAY_MIN
from tests.support.counts import scaled

kernel = pytest.importorskip("nsm_core.ops.routing.kernel", reason="the kernels' compiler is not installed")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TAPER = 0.1
# relative, of fp32 arithmetic; the exponentials and divisions of a GPU are a few units off
FORWARD_TOLERANCE, GRADIENT_TOLERANCE = (1e-6, 1e-5) if DEVICE == "cpu" else (5e-6, 3e-5)
LEAVES = ("logits", "strength", "log_timescale")


def make_inputs(*leading: int, heads: int, slots: int) -> dict[str, Any]:
    """fp32 inputs whose scores are exact sums, so that fp64 sees the same ties."""
    inputs = {
        "logits": (torch.randn(*leading, heads, slots) * 1024).round() / 1024,
        "strength": 3 * torch.randn(*leading, heads),
        "selection_bias": torch.randint(-3, 4, (heads, slots)) / 1024,
        "log_timescale": 0.5 * torch.randn(heads, slots),
    }
    return {name: value.to(DEVICE) for name, value in inputs.items()} | {"valid": None}


def relative_error(got: Tensor, want: Tensor) -> float:
    """Against fp64; what is exactly zero there may be off by rounding."""
    return float((got.double() - want).norm() / want.norm().clamp(min=1e-3))


def gradients(inputs: dict[str, Any], grad: Tensor, top_k: int) -> tuple[Tensor, list[Tensor]]:
    """The specification in fp64."""
    exact = inputs | {name: inputs[name].double() for name in (*LEAVES, "selection_bias")}
    leaves = [exact[name].requires_grad_() for name in LEAVES]
    log_decay = routing_reference(**exact, top_k=top_k, taper=TAPER)
    return log_decay.detach(), list(torch.autograd.grad(log_decay, leaves, grad.double()))


def check(inputs: dict[str, Any], top_k: int) -> Tensor:
    grad = torch.randn_like(inputs["logits"])
    want, want_gradients = gradients(inputs, grad, top_k)
    log_decay, threshold = kernel.routing_forward(**inputs, top_k=top_k, taper=TAPER)
    assert relative_error(log_decay, want) < FORWARD_TOLERANCE
    assert (log_decay == 0).equal(want == 0)
    got = kernel.routing_backward(**inputs, threshold=threshold, grad=grad, top_k=top_k, taper=TAPER)
    for name, tensor, exact in zip(LEAVES, got, want_gradients, strict=True):
        assert relative_error(tensor, exact) < GRADIENT_TOLERANCE, name
    return log_decay


@pytest.mark.parametrize(
    ("leading", "heads", "slots", "top_k"),
    [
        ((1, 1), 1, 16, 1),
        ((2, 37), 3, 64, 8),
        ((65,), 2, 32, 4),
        ((3,), 2, 64, 63),
        ((5, 9), 2, 64, 64),
        ((40,), 2, 24, 6),
        ((7,), 1, 128, 16),
        ((3,), 1, 300, 32),
    ],
    ids=lambda value: str(value).replace(" ", ""),
)
def test_kernels_equal_the_reference(leading: tuple[int, ...], heads: int, slots: int, top_k: int) -> None:
    log_decay = check(make_inputs(*leading, heads=heads, slots=slots), top_k)
    assert bool((log_decay <= 0).all())
    assert bool((log_decay >= LOG_DECAY_MIN).all())
    assert int((log_decay < 0).sum(dim=-1).max()) <= top_k


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # numpy's word for the NaN below
@settings(max_examples=scaled(12, 200))
@given(levels=st.integers(1, 6), top_k=st.integers(1, 16), seed=st.integers(0, 999))
def test_equal_scores_count_one_by_one(levels: int, top_k: int, seed: int) -> None:
    torch.manual_seed(seed)
    inputs = make_inputs(9, heads=2, slots=16)
    inputs["logits"] = torch.randint(levels, inputs["logits"].shape, device=DEVICE).float() / 4
    inputs["selection_bias"].zero_()
    # k + 1 equal scores at the top leave no slot above the threshold: no distribution, NaN in both forms
    want = routing_reference(**inputs, top_k=top_k, taper=TAPER)
    got, _ = kernel.routing_forward(**inputs, top_k=top_k, taper=TAPER)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-7, equal_nan=True)


def test_a_strong_write_is_clamped_and_passes_no_gradient() -> None:
    inputs = make_inputs(6, heads=1, slots=16)
    inputs["strength"].fill_(60.0)
    log_decay = check(inputs, top_k=2)
    assert bool((log_decay == LOG_DECAY_MIN).any())


def test_a_token_that_may_not_write_has_neither_decay_nor_gradient() -> None:
    inputs = make_inputs(3, 21, heads=2, slots=16)
    valid = torch.rand(3, 21, device=DEVICE) < 0.6
    log_decay = check(inputs | {"valid": valid}, top_k=3)
    assert bool((log_decay[~valid] == 0).all())
    assert bool((log_decay[valid] < 0).any(dim=-1).all())


def test_a_nan_logit_is_not_hidden() -> None:
    inputs = make_inputs(4, heads=1, slots=16)
    inputs["logits"][2, 0, 5] = torch.nan
    log_decay, _ = kernel.routing_forward(**inputs, top_k=3, taper=TAPER)
    assert log_decay.isnan().any(dim=-1)[:, 0].tolist() == [False, False, True, False]


def test_no_tokens() -> None:
    inputs = make_inputs(0, heads=2, slots=16)
    log_decay, threshold = kernel.routing_forward(**inputs, top_k=3, taper=TAPER)
    assert log_decay.shape == (0, 2, 16)
    grads = kernel.routing_backward(**inputs, threshold=threshold, grad=log_decay, top_k=3, taper=TAPER)
    assert [grad.abs().sum().item() for grad in grads] == [0.0, 0.0, 0.0]


def test_dispatch_on_a_cpu_is_the_reference() -> None:
    inputs = make_inputs(5, heads=2, slots=16)
    inputs = inputs | {name: inputs[name].cpu() for name in (*LEAVES, "selection_bias")}
    got = route(**inputs, top_k=4, taper=TAPER)
    assert got.equal(routing_reference(**inputs, top_k=4, taper=TAPER))


def test_the_operator_is_described_truly_to_the_compiler() -> None:
    """Shapes without data, autograd and schema of the operator that a compiled model calls."""
    inputs = make_inputs(3, 5, heads=2, slots=16)
    for name in LEAVES:
        inputs[name].requires_grad_()
    checks = ("test_schema", "test_faketensor", "test_autograd_registration", "test_aot_dispatch_dynamic")
    for valid in (None, torch.rand(3, 5, device=DEVICE) < 0.5):
        arguments = (*(inputs | {"valid": valid}).values(), 4, TAPER)
        torch.library.opcheck(torch.ops.nsm.route.default, arguments, test_utils=checks)


@pytest.mark.gpu
@pytest.mark.parametrize("top_k", [8, 64])
def test_at_full_size_on_a_gpu(top_k: int) -> None:
    inputs = make_inputs(4, 1000, heads=8, slots=64)
    check(inputs, top_k)
    leaves = [inputs[name].requires_grad_() for name in LEAVES]
    results = []
    for _ in range(2):
        log_decay = route(**inputs, top_k=top_k, taper=TAPER)
        results.append([log_decay, *torch.autograd.grad(log_decay.square().sum(), leaves)])
    assert all(first.equal(second) for first, second in zip(*results, strict=True))
