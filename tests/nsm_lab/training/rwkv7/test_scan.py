"""The scan that RWKV-7 is trained with beside its equations, token by token in fp64."""

from __future__ import annotations

import importlib.util

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nsm_core.rwkv7.time_mix import MAX_DECAY, state_scan
from nsm_lab.training.rwkv7.scan import CHUNK_TOKENS, scan_kernel

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


@pytest.mark.parametrize(("chunks", "width"), [(2, 32), (1, 64)])
def test_kernels_agree_with_the_reference(chunks: int, width: int) -> None:
    torch.manual_seed(chunks)
    inputs = make_inputs(2, chunks * CHUNK_TOKENS, 1, width)
    exact = {name: value.double() for name, value in inputs.items()}
    start = torch.zeros(2, 1, width, width, dtype=torch.float64, device=DEVICE)
    expected, _ = state_scan(**exact, initial=start)
    y = scan_kernel(**inputs)
    assert error(y, expected) < TOLERANCE
    weight = torch.randn_like(y)
    found = torch.autograd.grad((y * weight).sum(), tuple(inputs.values()))
    wanted = torch.autograd.grad((expected * weight).sum(), tuple(inputs.values()))
    for name, one, other in zip(NAMES, found, wanted, strict=True):
        assert error(one, other) < GRADIENT_TOLERANCE, name
