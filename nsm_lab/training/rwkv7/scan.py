"""The state scan of RWKV-7 to train with: kernels on a GPU, the reference elsewhere; one operator for torch.compile.

The kernels are imported when they first run: this module works without their compiler.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nsm_core.ops.dispatch import runs_kernels
from nsm_core.rwkv7.time_mix import state_scan

CHUNK_TOKENS = 16  # a row of the kernels is a multiple of this
HEAD_SIZES = (32, 64)


def trained_scan(*, r: Tensor, w: Tensor, k: Tensor, v: Tensor, removed: Tensor, rate: Tensor) -> Tensor:
    """As `state_scan` from a state of zeros: all [B,T,H,K] fp32 -> y [B,T,H,K]."""
    if runs_kernels(r) and r.shape[1] % CHUNK_TOKENS == 0 and r.shape[-1] in HEAD_SIZES:
        return scan_kernel(r=r, w=w, k=k, v=v, removed=removed, rate=rate)
    start = r.new_zeros(r.shape[0], *r.shape[2:], v.shape[-1])
    return state_scan(r=r, w=w, k=k, v=v, removed=removed, rate=rate, initial=start)[0]


def scan_kernel(*, r: Tensor, w: Tensor, k: Tensor, v: Tensor, removed: Tensor, rate: Tensor) -> Tensor:
    """`trained_scan` by the kernels, on a GPU or in their interpreter."""
    inputs = [part.contiguous() for part in (r, w, k, v, removed, removed * rate)]
    y: Tensor = _scan(*inputs)[0]
    return y


@torch.library.custom_op("nsm::rwkv7_scan", mutates_args=())
def _scan(r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor) -> list[Tensor]:
    from nsm_lab.training.rwkv7.kernel import run_forward

    return run_forward([r, w, k, v, a, b])


@_scan.register_fake
def _(r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor) -> list[Tensor]:
    batch, num_tokens, heads, width = r.shape
    states = r.new_empty(batch * heads, num_tokens // CHUNK_TOKENS, width, width)
    return [torch.empty_like(r), torch.empty_like(r), states]


@torch.library.custom_op("nsm::rwkv7_scan_backward", mutates_args=())
def _scan_backward(inputs: list[Tensor], d_y: Tensor, found: Tensor, states: Tensor) -> list[Tensor]:
    from nsm_lab.training.rwkv7.kernel import run_backward

    return run_backward(inputs, d_y, found, states)


@_scan_backward.register_fake
def _(inputs: list[Tensor], d_y: Tensor, found: Tensor, states: Tensor) -> list[Tensor]:
    return [torch.empty_like(part) for part in inputs]


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: list[Tensor]) -> None:
    ctx.save_for_backward(*inputs, *output[1:])


def _gradients(ctx: Any, grads: list[Tensor]) -> tuple[Tensor, ...]:
    *inputs, found, states = ctx.saved_tensors
    return tuple(_scan_backward(inputs, grads[0].contiguous(), found, states))


_scan.register_autograd(_gradients, setup_context=_keep)
