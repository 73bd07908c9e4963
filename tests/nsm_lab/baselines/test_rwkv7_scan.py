"""The kernels that RWKV-7 is trained with beside its equations in fp64."""

from __future__ import annotations

import importlib.util

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nsm_core.rwkv7.time_mix import MAX_DECAY, state_scan
from nsm_lab.baselines.delta_rule import delta_rule
from nsm_lab.baselines.rwkv7_scan.operator import CHUNK_TOKENS, scan_kernel
from nsm_lab.training.rwkv7.scan import trained_scan

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAMES = ("r", "w", "k", "v", "removed", "rate")
TOLERANCE, GRADIENT_TOLERANCE = 1e-5, 1e-3

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="the kernels' compiler is not installed"
)


def make_inputs(*shape: int) -> dict[str, Tensor]:
    drawn = {name: torch.randn(*shape, device=DEVICE) for name in NAMES}
    drawn["w"] = torch.exp(-MAX_DECAY * torch.sigmoid(2.0 * drawn["w"]))
    drawn["removed"] = F.normalize(drawn["removed"], dim=-1)
    drawn["rate"] = torch.sigmoid(drawn["rate"])
    return {name: value.requires_grad_() for name, value in drawn.items()}


def error(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()


def check_gradients(found: Tensor, expected: Tensor, inputs: dict[str, Tensor], *ends: tuple[Tensor, Tensor]) -> None:
    """Of a sum of all that `found` and `expected`, and the pairs of `ends`, say."""
    weights = [torch.randn_like(one) for one, _ in ((found, expected), *ends)]
    sums = [
        sum((part * weight).sum() for part, weight in zip(parts, weights, strict=True))
        for parts in zip((found, expected), *ends, strict=True)
    ]
    ours, wanted = (torch.autograd.grad(total, tuple(inputs.values())) for total in sums)
    for name, one, other in zip(inputs, ours, wanted, strict=True):
        assert error(one, other) < GRADIENT_TOLERANCE, name


@pytest.mark.parametrize(("chunks", "width"), [(2, 32), (1, 64)])
def test_kernels_agree_with_the_reference(chunks: int, width: int) -> None:
    torch.manual_seed(chunks)
    inputs = make_inputs(2, chunks * CHUNK_TOKENS, 1, width)
    exact = {name: value.double() for name, value in inputs.items()}
    start = torch.zeros(2, 1, width, width, dtype=torch.float64, device=DEVICE)
    expected, _ = state_scan(**exact, initial=start)
    given = {name: value for name, value in inputs.items() if name != "rate"}
    y, _ = scan_kernel(**given, added=inputs["removed"] * inputs["rate"])
    assert error(y, expected) < TOLERANCE
    check_gradients(y, expected, inputs)


def check_continued_texts(width: int, heads: int) -> None:
    """A row that goes on from a state, one in which a text begins, and one in which two begin."""
    inputs = make_inputs(3, 128, heads, width)
    inputs["state"] = torch.randn(3, heads, width, width, device=DEVICE, requires_grad=True)
    reset = torch.tensor([[False, False], [False, True], [True, True]], device=DEVICE)
    exact = {name: value.double() for name, value in inputs.items()}
    added = exact["removed"] * exact["rate"]
    expected, end = delta_rule(
        r=exact["r"], log_w=exact["w"].log(), k=exact["k"], v=exact["v"], a=-exact["removed"], b=added,
        state=exact["state"], reset=reset,
    )  # fmt: skip
    given = {name: value for name, value in inputs.items() if name != "rate"}
    y, last = scan_kernel(**given, added=inputs["removed"] * inputs["rate"], reset=reset)
    assert error(y, expected) < TOLERANCE
    assert error(last, end) < TOLERANCE
    check_gradients(y, expected, inputs, (last, end))


def test_kernels_continue_states_and_begin_texts() -> None:
    torch.manual_seed(3)
    check_continued_texts(32, 1)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [64, 128, 256])
def test_on_a_gpu_kernels_continue_states_and_begin_texts(width: int) -> None:
    torch.manual_seed(width)
    check_continued_texts(width, 2)


def test_other_machines_scan_by_the_plain_form() -> None:
    torch.manual_seed(4)
    inputs = {name: value.cpu() for name, value in make_inputs(2, 5, 1, 32).items()}
    start = torch.zeros(2, 1, 32, 32)
    assert torch.equal(trained_scan(**inputs), state_scan(**inputs, initial=start)[0])
