"""The keyed scan's kernels as two operators that torch.compile leaves whole: `nsm::keyed_scan` and its backward.

The kernels are imported when they first run: this module works without their compiler.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nsm_core.ops.dispatch import operator_or_function
from nsm_core.ops.slot_scan.chunked import CHUNK_LEN

_INPUTS = "Tensor q, Tensor k, Tensor v, Tensor strength, Tensor log_decay, Tensor state, Tensor? reset"
_NAMES = [declared.split()[-1] for declared in _INPUTS.split(",")]
_DIFFERENTIABLE = _NAMES[:-1]
_SAVED = ("inverse", "of_state", "states", "corrections")

SUPPORTED_WIDTHS = (32, 64, 128)  # of keys and of values


def is_supported(q: Tensor, v: Tensor) -> bool:
    """Whether the kernels take these shapes and dtypes."""
    return q.dtype != torch.float64 and {q.shape[-1], v.shape[-1]} <= set(SUPPORTED_WIDTHS)


def _forward(*args: Tensor | None) -> list[Tensor]:
    from nsm_core.ops.keyed_scan.kernel_launch import KeyedInputs, run_forward

    results = run_forward(KeyedInputs(**_named(args)))
    return [results.out, results.final, *(getattr(results, name) for name in _SAVED)]


def _forward_shapes(*args: Tensor | None) -> list[Tensor]:
    given = _named(args)
    q, v, state = given["q"], given["v"], given["state"]
    matrices = (q.shape[0] * ((q.shape[1] + CHUNK_LEN - 1) // CHUNK_LEN), q.shape[2])
    return [
        torch.empty_like(v),
        torch.empty_like(state),
        q.new_empty(*matrices, CHUNK_LEN, CHUNK_LEN),
        torch.empty_like(q),
        q.new_empty(*matrices, *state.shape[2:]),
        torch.empty_like(v),
    ]


def _backward(d_out: Tensor, d_final: Tensor, saved: list[Tensor], *args: Tensor | None) -> list[Tensor]:
    from nsm_core.ops.keyed_scan.kernel_launch import KeyedInputs, run_backward

    given = dict(zip(_SAVED, saved, strict=True))
    grads = run_backward(KeyedInputs(**_named(args)), **given, d_out=d_out, d_final=d_final)
    return [getattr(grads, name) for name in _DIFFERENTIABLE]


def _backward_shapes(d_out: Tensor, d_final: Tensor, saved: list[Tensor], *args: Tensor | None) -> list[Tensor]:
    given = _named(args)
    return [torch.empty_like(given[name]) for name in _DIFFERENTIABLE]


def _named(args: tuple[Tensor | None, ...]) -> dict[str, Any]:
    return dict(zip(_NAMES, args, strict=True))


_keyed_scan = torch.library.custom_op("nsm::keyed_scan", _forward, mutates_args=(), schema=f"({_INPUTS}) -> Tensor[]")
_keyed_scan.register_fake(_forward_shapes)
_keyed_scan_backward = torch.library.custom_op(
    "nsm::keyed_scan_backward",
    _backward,
    mutates_args=(),
    schema=f"(Tensor d_out, Tensor d_final, Tensor[] kept, {_INPUTS}) -> Tensor[]",
)
_keyed_scan_backward.register_fake(_backward_shapes)


def _save(ctx: Any, inputs: tuple[Tensor | None, ...], output: list[Tensor]) -> None:
    ctx.set_materialize_grads(False)  # zeros of the chunk states' size would be made for nothing
    ctx.save_for_backward(*output[2:], *inputs)


def _gradients(ctx: Any, grads: list[Tensor | None]) -> tuple[Tensor | None, ...]:
    saved, inputs = ctx.saved_tensors[: len(_SAVED)], ctx.saved_tensors[len(_SAVED) :]
    given = _named(inputs)
    d_out, d_final = grads[:2]
    d_out = torch.zeros_like(given["v"]) if d_out is None else d_out.contiguous()
    d_final = torch.zeros_like(given["state"]) if d_final is None else d_final.contiguous()
    return (*_keyed_scan_backward(d_out, d_final, list(saved), *inputs), None)


_keyed_scan.register_autograd(_gradients, setup_context=_save)


def keyed_scan_kernel(
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    strength: Tensor,
    log_decay: Tensor,
    state: Tensor,
    reset: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Same arguments and result as `keyed_scan_reference`; products in bf16 if any of q, k and v is not fp32."""
    operand = _operand_dtype(q, k, v)
    scan = operator_or_function(_keyed_scan, _forward)
    out, final, *_ = scan(
        *(x.to(operand).contiguous() for x in (q, k, v)),
        *(x.to(torch.float32).contiguous() for x in (strength, log_decay, state)),
        None if reset is None else reset.to(torch.uint8).contiguous(),
    )
    return out, final


def _operand_dtype(*tensors: Tensor) -> torch.dtype:
    if torch.is_autocast_enabled(tensors[0].device.type):
        return torch.bfloat16
    return torch.float32 if all(x.dtype == torch.float32 for x in tensors) else torch.bfloat16
