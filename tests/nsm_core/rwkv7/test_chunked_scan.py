from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nsm_core.rwkv7.chunked_scan import state_scan_chunked
from nsm_core.rwkv7.time_mix import MAX_DECAY, state_scan


def inputs(num_tokens: int, dtype: torch.dtype) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(num_tokens)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw).to(dtype)

    tokens = (2, num_tokens, 3, 8)
    return {
        "r": normal(*tokens),
        "w": torch.exp(-MAX_DECAY * torch.sigmoid(4 * normal(*tokens))),
        "k": normal(*tokens),
        "v": normal(*tokens[:3], 5),
        "removed": F.normalize(normal(*tokens), dim=-1),
        "rate": torch.sigmoid(normal(*tokens)),
        "initial": normal(2, 3, 8, 5),
    }


@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 50])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-4)])
def test_chunks_give_the_reads_and_the_state_of_single_tokens(
    num_tokens: int, dtype: torch.dtype, tolerance: float
) -> None:
    given = inputs(num_tokens, dtype)
    for found, expected in zip(state_scan_chunked(**given), state_scan(**given), strict=True):
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def test_gradients_agree_with_those_of_single_tokens() -> None:
    gradients = []
    for scan in (state_scan, state_scan_chunked):
        given = {name: value.requires_grad_() for name, value in inputs(37, torch.float64).items()}
        read, state = scan(**given)
        (read.square().sum() + state.sum()).backward()  # type: ignore[no-untyped-call]
        gradients.append({name: value.grad for name, value in given.items()})
    for name, expected in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], expected, rtol=1e-9, atol=1e-9)


def test_padding_keeps_the_state() -> None:
    given = inputs(20, torch.float64)
    is_token = (torch.arange(20) < 13)[None, :, None, None]
    padded = given | {"w": torch.where(is_token, given["w"], 1.0)}
    padded |= {name: given[name] * is_token for name in ("k", "removed")}
    short = {name: value if name == "initial" else value[:, :13] for name, value in given.items()}
    torch.testing.assert_close(state_scan_chunked(**padded)[1], state_scan(**short)[1])
