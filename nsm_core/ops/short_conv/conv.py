"""Mixing of neighbouring tokens: one signature, kernels on a GPU and plain PyTorch elsewhere.

The kernels are imported when they are first needed: a server without a GPU neither needs nor loads their compiler.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nsm_core.ops.dispatch import operator_or_function, runs_kernels
from nsm_core.ops.short_conv.reference import convolve, short_conv_reference

KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def short_conv(
    *,
    qkv: Tensor,
    weight: Tensor,
    tail: Tensor,
    num_heads: int,
    eps: float,
    reset: Tensor | None = None,
    lengths: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Depthwise causal convolution, SiLU, heads, and RMSNorm on queries and keys.

    qkv [B,T,3d], a view with any row strides; weight [taps,3d] fp32, its last row for the token itself; tail
    [B,taps-1,3d] fp32: the tokens before the first. `reset` [B, T/CHUNK_LEN] bool: a document starts at this chunk and
    sees nothing before it. `lengths` [B]: tokens of right-padded rows.

    Returns q, k, v [B,T,H,K] in the dtype of qkv, computed in fp32, and the tail after each row's last token.
    """
    if not (runs_kernels(qkv) and qkv.dtype in KERNEL_DTYPES):
        return short_conv_reference(
            qkv=qkv, weight=weight, tail=tail, num_heads=num_heads, eps=eps, reset=reset, lengths=lengths
        )
    conv = operator_or_function(_short_conv, _forward)
    q, k, v, new_tail = conv(qkv, weight, tail, reset, lengths, num_heads, eps)
    return q, k, v, new_tail


def context_conv(*, joined: Tensor, weight: Tensor, reset: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The convolution of `short_conv` alone: joined [B, taps - 1 + T, D] (the tail, then the tokens), weight [taps, D]
    fp32 -> [B,T,D] in `dtype`, computed in fp32. The kernel, in inference, has the reference's bits.
    """
    is_plain = torch.is_inference_mode_enabled() and not torch.compiler.is_compiling()
    if reset is not None or not (is_plain and runs_kernels(joined) and joined.dtype in KERNEL_DTYPES):
        return convolve(joined.to(weight.dtype), weight, reset).to(dtype)
    from nsm_core.ops.short_conv.kernel_context import convolve_rows

    return convolve_rows(joined, weight, dtype)


def _forward(
    qkv: Tensor, weight: Tensor, tail: Tensor, reset: Tensor | None, lengths: Tensor | None, num_heads: int, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from nsm_core.ops.short_conv.kernel_forward import short_conv_forward

    return short_conv_forward(qkv, weight, tail, reset, lengths, num_heads, eps)


_short_conv = torch.library.custom_op(
    "nsm::short_conv",
    _forward,
    mutates_args=(),
    schema="(Tensor qkv, Tensor weight, Tensor tail, Tensor? reset, Tensor? lengths, int num_heads, float eps)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
)


@torch.library.custom_op(
    "nsm::short_conv_backward",
    mutates_args=(),
    schema="(Tensor qkv, Tensor weight, Tensor tail, Tensor? reset, Tensor? lengths, Tensor d_q,"
    " Tensor d_k, Tensor d_v, Tensor? d_new_tail, int num_heads, float eps) -> (Tensor, Tensor, Tensor)",
)
def _short_conv_backward(
    qkv: Tensor,
    weight: Tensor,
    tail: Tensor,
    reset: Tensor | None,
    lengths: Tensor | None,
    d_q: Tensor,
    d_k: Tensor,
    d_v: Tensor,
    d_new_tail: Tensor | None,
    num_heads: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    from nsm_core.ops.short_conv.kernel_backward import short_conv_backward

    return short_conv_backward(qkv, weight, tail, reset, lengths, d_q, d_k, d_v, d_new_tail, num_heads, eps)


@_short_conv.register_fake
def _(
    qkv: Tensor, weight: Tensor, tail: Tensor, _: Tensor | None, __: Tensor | None, num_heads: int, ___: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    batch, num_tokens, width = qkv.shape
    head = (batch, num_tokens, num_heads, width // (3 * num_heads))
    return qkv.new_empty(head), qkv.new_empty(head), qkv.new_empty(head), tail.new_empty(tail.shape)


@_short_conv_backward.register_fake
def _(qkv: Tensor, weight: Tensor, tail: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return qkv.new_empty(qkv.shape), weight.new_empty(weight.shape), tail.new_empty(tail.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.num_heads, ctx.eps = inputs
    ctx.save_for_backward(*tensors)


def _autograd(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    d_qkv, d_weight, d_tail = _short_conv_backward(*ctx.saved_tensors, *grads, ctx.num_heads, ctx.eps)
    return d_qkv, d_weight, d_tail, None, None, None, None


_short_conv.register_autograd(_autograd, setup_context=_setup_context)
