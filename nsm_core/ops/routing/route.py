"""Routing: one signature, kernels on a GPU and plain PyTorch elsewhere.

The kernels are imported when they are first needed: a server without a GPU neither needs nor loads their compiler.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nsm_core.ops.dispatch import operator_or_function, runs_kernels
from nsm_core.ops.routing.reference import routing_reference


def route(
    *,
    logits: Tensor,
    strength: Tensor,
    selection_bias: Tensor,
    log_timescale: Tensor,
    top_k: int,
    taper: float,
    valid: Tensor | None = None,
) -> Tensor:
    """logits [..., H, M] fp32; strength [..., H] before its softplus; selection_bias, log_timescale [H, M].

    `valid` [...] bool: tokens that may write at all; None: all. Returns the log decay [..., H, M] in
    [LOG_DECAY_MIN, 0]: exactly 0 for slots that were not selected. The write weight is -expm1 of it. No gradient
    reaches selection_bias.
    """
    if not (runs_kernels(logits) and logits.dtype == torch.float32):
        return routing_reference(
            logits=logits,
            strength=strength,
            selection_bias=selection_bias,
            log_timescale=log_timescale,
            top_k=top_k,
            taper=taper,
            valid=valid,
        )
    routed = operator_or_function(_route, _forward)
    log_decay: Tensor
    log_decay, _ = routed(logits, strength, selection_bias, log_timescale, valid, top_k, taper)
    return log_decay


def _forward(
    logits: Tensor,
    strength: Tensor,
    selection_bias: Tensor,
    log_timescale: Tensor,
    valid: Tensor | None,
    top_k: int,
    taper: float,
) -> tuple[Tensor, Tensor]:
    from nsm_core.ops.routing.kernel import routing_forward

    return routing_forward(logits, strength, selection_bias, log_timescale, valid, top_k, taper)


_route = torch.library.custom_op(
    "nsm::route",
    _forward,
    mutates_args=(),
    schema="(Tensor logits, Tensor strength, Tensor selection_bias, Tensor log_timescale, Tensor? valid,"
    " int top_k, float taper) -> (Tensor, Tensor)",
)


@torch.library.custom_op(
    "nsm::route_backward",
    mutates_args=(),
    schema="(Tensor logits, Tensor strength, Tensor selection_bias, Tensor log_timescale, Tensor? valid,"
    " Tensor threshold, Tensor grad, int top_k, float taper) -> (Tensor, Tensor, Tensor)",
)
def _route_backward(
    logits: Tensor,
    strength: Tensor,
    selection_bias: Tensor,
    log_timescale: Tensor,
    valid: Tensor | None,
    threshold: Tensor,
    grad: Tensor,
    top_k: int,
    taper: float,
) -> tuple[Tensor, Tensor, Tensor]:
    from nsm_core.ops.routing.kernel import routing_backward

    return routing_backward(logits, strength, selection_bias, log_timescale, valid, threshold, grad, top_k, taper)


@_route.register_fake
def _(logits: Tensor, strength: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return logits.new_empty(logits.shape), strength.new_empty(strength.shape)


@_route_backward.register_fake
def _(logits: Tensor, strength: Tensor, _: Tensor, log_timescale: Tensor, *__: Any) -> tuple[Tensor, Tensor, Tensor]:
    return logits.new_empty(logits.shape), strength.new_empty(strength.shape), torch.empty_like(log_timescale)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.top_k, ctx.taper = inputs
    ctx.save_for_backward(*tensors, output[1])


def _autograd(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    d_logits, d_strength, d_timescale = _route_backward(*ctx.saved_tensors, grad, ctx.top_k, ctx.taper)
    return d_logits, d_strength, None, d_timescale, None, None, None


_route.register_autograd(_autograd, setup_context=_setup_context)
