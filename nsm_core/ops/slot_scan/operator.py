"""The slot scan's kernels as two operators that torch.compile does not split: `nsm::slot_scan` and its backward.

The backward pass reads the stored states at the chunk starts. A head of 64 slots and 64 dimensions stores 512 bytes a
token, a fraction of the block's activations, and saves two of three kernels. The kernels are imported at their first
call: this module works without their compiler.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nsm_core.ops.dispatch import operator_or_function
from nsm_core.ops.slot_scan.chunked import CHUNK_LEN
from nsm_core.ops.slot_scan.inputs import ScanInputs

_INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor log_decay, Tensor scale, Tensor state, "
    "Tensor? reset, Tensor? initial, Tensor? read_bias, Tensor? active, Tensor? cu_seqlens"
)
_NAMES = [declared.split()[-1] for declared in _INPUTS.split(",")]
_DIFFERENTIABLE = ("q", "k", "v", "log_decay", "scale", "state", "initial", "read_bias")

# (slots, head dimensions) whose results were compared on a GPU, by the dtype of the products. The kernels support 16 to
# 128 slots and 32 to 128 dimensions; sizes that were not compared run in chunks.
CHECKED_SIZES = {
    torch.bfloat16: ((16, 32), (32, 32), (64, 64), (64, 128), (128, 64), (128, 128)),
    torch.float32: ((16, 32), (32, 32), (64, 64), (64, 128), (128, 64)),
}
SUPPORTED_HEAD_DIMS = (32, 64, 128)
SUPPORTED_SLOTS = (16, 32, 64, 128)
LARGEST_BANK_BYTES = 32768


def _named(args: tuple[Tensor | None, ...]) -> dict[str, Any]:
    return dict(zip(_NAMES, args, strict=True))


def _forward(*args: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from nsm_core.ops.slot_scan.kernel_launch import KernelInputs, run_forward

    return run_forward(KernelInputs(**_named(args)))


def _forward_shapes(*args: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    given = _named(args)
    q, state = given["q"], given["state"]
    if given["cu_seqlens"] is None:
        num_chunks = q.shape[0] * ((q.shape[1] + CHUNK_LEN - 1) // CHUNK_LEN)
    else:
        num_chunks = q.shape[1] // CHUNK_LEN + state.shape[0]
    states, decays = state.new_empty(num_chunks, *state.shape[1:]), state.new_empty(num_chunks, *state.shape[1:3])
    return torch.empty_like(q), torch.empty_like(state), states, decays


def _backward(d_out: Tensor, d_final: Tensor, states: Tensor, decays: Tensor, *args: Tensor | None) -> list[Tensor]:
    from nsm_core.ops.slot_scan.kernel_launch import KernelInputs, run_backward

    grads = run_backward(KernelInputs(**_named(args)), states, decays, d_out, d_final)
    return [grad for name in _DIFFERENTIABLE if (grad := getattr(grads, name)) is not None]


def _backward_shapes(
    d_out: Tensor, d_final: Tensor, states: Tensor, decays: Tensor, *args: Tensor | None
) -> list[Tensor]:
    given = _named(args)
    return [torch.empty_like(given[name]) for name in _differentiable(given)]


def _differentiable(given: dict[str, Any]) -> list[str]:
    """Names of the inputs that get a gradient, in the order of the backward operator's result."""
    return [name for name in _DIFFERENTIABLE if given[name] is not None]


_slot_scan = torch.library.custom_op(
    "nsm::slot_scan", _forward, mutates_args=(), schema=f"({_INPUTS}) -> (Tensor, Tensor, Tensor, Tensor)"
)
_slot_scan.register_fake(_forward_shapes)
_slot_scan_backward = torch.library.custom_op(
    "nsm::slot_scan_backward",
    _backward,
    mutates_args=(),
    schema=f"(Tensor d_out, Tensor d_final, Tensor states, Tensor decays, {_INPUTS}) -> Tensor[]",
)
_slot_scan_backward.register_fake(_backward_shapes)


def _save(ctx: Any, inputs: tuple[Tensor | None, ...], output: tuple[Tensor, ...]) -> None:
    _, _, states, decays = output
    ctx.mark_non_differentiable(states, decays)
    ctx.set_materialize_grads(False)  # saves zeros of the chunk states' size
    ctx.save_for_backward(states, decays, *inputs)


def _gradients(
    ctx: Any, d_out: Tensor | None, d_final: Tensor | None, d_states: None, d_decays: None
) -> tuple[Tensor | None, ...]:
    states, decays, *inputs = ctx.saved_tensors
    given = _named(tuple(inputs))
    d_out = torch.zeros_like(given["q"]) if d_out is None else d_out.contiguous()
    d_final = torch.zeros_like(given["state"]) if d_final is None else d_final.contiguous()
    grads = _slot_scan_backward(d_out, d_final, states, decays, *inputs)
    by_name = dict(zip(_differentiable(given), grads, strict=True))
    return tuple(by_name.get(name) for name in _NAMES)


_slot_scan.register_autograd(_gradients, setup_context=_save)


def is_supported(q: Tensor, log_decay: Tensor) -> bool:
    """Whether to use the kernels for these shapes and dtypes: only those whose results were compared on a GPU."""
    sizes = CHECKED_SIZES[_operand_dtype(q)]
    return q.dtype != torch.float64 and (log_decay.shape[-1], q.shape[-1]) in sizes


def fits_shared_memory(*, slots: int, head_dim: int, dtype: torch.dtype) -> bool:
    """Whether a bank fits into a GPU's shared memory; 128 slots of 128 dimensions in fp32 exceed an H200's by 30 KB."""
    return slots * head_dim * dtype.itemsize <= LARGEST_BANK_BYTES


def slot_scan_kernel(inputs: ScanInputs) -> tuple[Tensor, Tensor]:
    """Same result as `slot_scan_reference`; products in bf16 if any of q, k and v is not fp32.

    Raises ValueError without q and k, and for a bank that is larger than a GPU's shared memory.
    """
    q, k, v, log_decay = inputs.q, inputs.k, inputs.v, inputs.log_decay
    if q is None or k is None:
        raise ValueError("the kernels read slots by q and k")
    operand, slots, head_dim = _operand_dtype(q, k, v), log_decay.shape[-1], q.shape[-1]
    if not fits_shared_memory(slots=slots, head_dim=head_dim, dtype=operand):
        raise ValueError(f"the kernels do not hold {slots} slots of {head_dim} dimensions in {operand}")
    has_reset = inputs.reset is not None and inputs.initial is not None
    scan = operator_or_function(_slot_scan, _forward)
    out, final, _, _ = scan(
        *(x.to(operand).contiguous() for x in (q, k, v)),
        *(x.to(torch.float32).contiguous() for x in (log_decay, inputs.scale, inputs.state)),
        _as(torch.uint8, inputs.reset if has_reset else None),
        _as(torch.float32, inputs.initial if has_reset else None),
        _as(torch.float32, inputs.read_bias),
        _as(torch.uint8, inputs.active),
        _as(torch.int32, inputs.cu_seqlens),
    )
    return out, final


def _as(dtype: torch.dtype, x: Tensor | None) -> Tensor | None:
    return None if x is None else x.to(dtype).contiguous()


def _operand_dtype(*tensors: Tensor) -> torch.dtype:
    """bf16 for every half type: the decay factors exceed the range of fp16."""
    if torch.is_autocast_enabled(tensors[0].device.type):
        return torch.bfloat16
    return torch.float32 if all(x.dtype == torch.float32 for x in tensors) else torch.bfloat16
