"""The state scan of RWKV-7 to train with: kernels on a GPU; one operator for torch.compile.

The kernels are imported when they first run: this module works without their compiler.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nsm_core.ops.dispatch import runs_kernels

CHUNK_TOKENS = 16  # a row of the kernels is a multiple of this, with `reset` of four times as many
HEAD_SIZES = (32, 64, 128, 256)


def has_kernel(r: Tensor) -> bool:
    """Whether the kernels can read tokens r [B,T,H,K]."""
    return runs_kernels(r) and r.shape[1] % CHUNK_TOKENS == 0 and r.shape[-1] in HEAD_SIZES


def scan_kernel(
    *,
    r: Tensor,
    w: Tensor,
    k: Tensor,
    v: Tensor,
    removed: Tensor,
    added: Tensor,
    state: Tensor | None = None,
    reset: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """S <- diag(w) S - added (removed^T S) + k v^T, y = S^T r, by the kernels, on a GPU or in their interpreter.

    All [B,T,H,K] fp32; state [B,H,K,K], None: zeros; reset [B, T/64] bool: the state is zero there. Returns y [B,T,H,K]
    and the state after the last token.
    """
    if state is None:
        state = r.new_zeros(r.shape[0], *r.shape[2:], v.shape[-1])
    flags = None if reset is None else reset.to(torch.uint8).contiguous()
    inputs = [part.contiguous() for part in (r, w, k, v, removed, added)]
    y, _, _, last = _scan(*inputs, state.contiguous(), flags)
    return y, last


@torch.library.custom_op("nsm::rwkv7_scan", mutates_args=())
def _scan(
    r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, state: Tensor, reset: Tensor | None
) -> list[Tensor]:
    from nsm_lab.baselines.rwkv7_scan.kernel import run_forward

    return run_forward([r, w, k, v, a, b], state, reset)


@_scan.register_fake
def _(
    r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, state: Tensor, reset: Tensor | None
) -> list[Tensor]:
    batch, num_tokens, heads, width = r.shape
    states = r.new_empty(batch * heads, num_tokens // CHUNK_TOKENS, width, width)
    return [torch.empty_like(r), torch.empty_like(r), states, torch.empty_like(state)]


@torch.library.custom_op("nsm::rwkv7_scan_backward", mutates_args=())
def _scan_backward(
    inputs: list[Tensor], reset: Tensor | None, d_y: Tensor, d_last: Tensor, found: Tensor, states: Tensor
) -> list[Tensor]:
    from nsm_lab.baselines.rwkv7_scan.kernel import run_backward

    return run_backward(inputs, reset, d_y, d_last, found, states)


@_scan_backward.register_fake
def _(
    inputs: list[Tensor], reset: Tensor | None, d_y: Tensor, d_last: Tensor, found: Tensor, states: Tensor
) -> list[Tensor]:
    return [*(torch.empty_like(part) for part in inputs), torch.empty_like(d_last)]


def _keep(ctx: Any, inputs: tuple[Tensor | None, ...], output: list[Tensor]) -> None:
    *tokens, _, reset = inputs
    _, found, states, _ = output
    ctx.has_reset = reset is not None
    ctx.save_for_backward(*tokens, found, states, *(() if reset is None else (reset,)))


def _gradients(ctx: Any, grads: list[Tensor]) -> tuple[Tensor | None, ...]:
    *tokens, found, states = ctx.saved_tensors[:8]
    reset = ctx.saved_tensors[8] if ctx.has_reset else None
    d_y, _, _, d_last = grads
    return (*_scan_backward(tokens, reset, d_y.contiguous(), d_last.contiguous(), found, states), None)


_scan.register_autograd(_gradients, setup_context=_keep)
