"""Grids, buffers and fixed configurations of the slot scan's kernels."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nsm_core.ops.slot_scan.chunked import CHUNK_LEN
from nsm_core.ops.slot_scan.kernel_backward import (
    chunk_bank_backward_kernel,
    chunk_read_backward_kernel,
    chunk_scan_backward_kernel,
)
from nsm_core.ops.slot_scan.kernel_forward import chunk_read_kernel, chunk_scan_kernel, chunk_update_kernel

SCAN_ELEMENTS = 512  # state elements of one program of the scan: few, so that one sequence fills a device
SLOT_BLOCK = 32  # slots of one program of the bank gradients
SCAN_STAGES = 4  # chunks that load while one is computed


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelInputs:
    """ScanInputs as the kernels read them: contiguous; q, k, v in one of bf16 or fp32, everything else in fp32."""

    q: Tensor  # [B,T,H,K]
    k: Tensor
    v: Tensor
    log_decay: Tensor  # [B,T,H,M]
    scale: Tensor  # [H]
    state: Tensor  # [rows,H,M,2K]
    reset: Tensor | None  # [B,T/64] uint8
    initial: Tensor | None  # [H,M,2K]
    read_bias: Tensor | None  # [B,T,H,M]
    active: Tensor | None  # [H,M] or [rows,H,M] uint8
    cu_seqlens: Tensor | None  # [rows+1] int32


class Launch:
    """The chunks of one call and the arguments that its kernels share."""

    def __init__(self, inputs: KernelInputs) -> None:
        self.inputs = inputs
        self.rows = inputs.state.shape[0]
        num_rows, self.num_tokens, self.heads, self.head_dim = inputs.q.shape
        self.slots = inputs.log_decay.shape[-1]
        self.chunks_per_row = -(-self.num_tokens // CHUNK_LEN)
        self.num_chunks = num_rows * self.chunks_per_row
        self.chunk_table: Tensor | None = None
        self.row_chunks: Tensor | None = None
        if inputs.cu_seqlens is not None:
            self.num_chunks = self.num_tokens // CHUNK_LEN + self.rows  # an upper bound for sequences of any lengths
            self.chunk_table, self.row_chunks = chunks_of_sequences(inputs.cu_seqlens, self.num_chunks)
        self.slot_block = min(self.slots, SLOT_BLOCK)
        self.grid = (self.num_chunks * self.heads,)
        rows_per_program = max(1, min(self.slots, SCAN_ELEMENTS // (2 * self.head_dim)))
        self.scan_grid = (self.rows * self.heads, self.slots // rows_per_program)
        self.scan = {
            "row_chunks": self.row_chunks,
            "chunks_per_row": self.chunks_per_row,
            "H": self.heads,
            "M": self.slots,
            "K": self.head_dim,
            "ROWS": rows_per_program,
            "RAGGED": self.chunk_table is not None,
            "RESET": inputs.reset is not None,
            "STAGES": SCAN_STAGES,
            "num_warps": 2,
        }

    def chunk_arguments(self, kernel: str) -> dict[str, Any]:
        inputs = self.inputs
        per_row = inputs.active is not None and inputs.active.dim() == 3
        return {
            "log_decay": inputs.log_decay,
            "active": inputs.active,
            "chunk_table": self.chunk_table,
            "num_tokens": self.num_tokens,
            "chunks_per_row": self.chunks_per_row,
            "active_stride": self.heads * self.slots if per_row else 0,
            "H": self.heads,
            "M": self.slots,
            "K": self.head_dim,
            "RAGGED": self.chunk_table is not None,
            "ACTIVE": inputs.active is not None,
            "PRECISION": "tf32x3",  # of fp32 products; bf16 ones have only one
            "num_warps": num_warps(kernel, self.slots, self.head_dim, inputs.q.dtype),
            "num_stages": 1,
        }

    def device(self) -> AbstractContextManager[Any]:
        """Kernels start on the current device, which need not be the tensors'."""
        return torch.cuda.device(self.inputs.q.device) if self.inputs.q.is_cuda else nullcontext()


def num_warps(kernel: str, slots: int, head_dim: int, dtype: torch.dtype) -> int:
    """Fixed choices instead of autotuning: a cold search costs minutes a model."""
    if min(slots, head_dim) < 64:
        return 2  # tiles too small for the four warps of a Hopper product: builds with 4 and 8 read out of bounds
    is_large = max(slots, head_dim) > 64
    if kernel in ("read_backward", "bank_backward"):
        return 8
    if kernel == "read":
        return 8 if is_large or dtype == torch.float32 else 4
    return 8 if is_large else 4


def chunks_of_sequences(cu_seqlens: Tensor, num_chunks: int) -> tuple[Tensor, Tensor]:
    """Per chunk its first token, length and row [num_chunks,3]; per row its first chunk [rows+1].

    Waits for no device. There may be fewer chunks than `num_chunks`; the rest have length 0.
    """
    lengths = cu_seqlens.diff()
    chunks = (lengths + CHUNK_LEN - 1) // CHUNK_LEN
    row_chunks = torch.nn.functional.pad(chunks.cumsum(0, dtype=torch.int32), (1, 0))
    index = torch.arange(num_chunks, device=cu_seqlens.device, dtype=torch.int32)
    row = torch.searchsorted(row_chunks[1:], index, right=True).clamp(max=lengths.shape[0] - 1)
    offset = (index - row_chunks[row]) * CHUNK_LEN
    length = (lengths[row] - offset).clamp(min=0, max=CHUNK_LEN)
    first = torch.where(length > 0, cu_seqlens[row] + offset, 0)
    return torch.stack((first, length, row), dim=1).to(torch.int32), row_chunks


def run_forward(inputs: KernelInputs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Output, final state, and for the backward pass: chunk states [chunks,H,M,2K], decays [chunks,H,M]."""
    launch = Launch(inputs)
    chunk_shape = (launch.num_chunks, launch.heads, launch.slots)
    states = inputs.state.new_empty(*chunk_shape, 2 * launch.head_dim)
    decays = inputs.state.new_empty(chunk_shape)
    out, final = torch.empty_like(inputs.q), torch.empty_like(inputs.state)
    if inputs.q.numel() == 0:
        return out, final.copy_(inputs.state), states, decays
    with launch.device():
        chunk_update_kernel[launch.grid](
            k=inputs.k, v=inputs.v, states=states, decays=decays, **launch.chunk_arguments("update")
        )
        chunk_scan_kernel[launch.scan_grid](
            states=states,
            decays=decays,
            state=inputs.state,
            final=final,
            reset=inputs.reset,
            initial=inputs.initial,
            **launch.scan,
        )
        chunk_read_kernel[launch.grid](
            q=inputs.q,
            k=inputs.k,
            v=inputs.v,
            scale=inputs.scale,
            read_bias=inputs.read_bias,
            states=states,
            out=out,
            BIAS=inputs.read_bias is not None,
            **launch.chunk_arguments("read"),
        )
    return out, final, states, decays


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanGradients:
    """Gradients of the inputs of the same names; None for an input that was not given."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor
    scale: Tensor
    state: Tensor
    initial: Tensor | None
    read_bias: Tensor | None


def run_backward(inputs: KernelInputs, states: Tensor, decays: Tensor, d_out: Tensor, d_final: Tensor) -> ScanGradients:
    launch = Launch(inputs)
    d_q, d_k, d_v = torch.empty_like(inputs.q), torch.empty_like(inputs.k), torch.empty_like(inputs.v)
    d_log_decay, d_state = torch.empty_like(inputs.log_decay), torch.empty_like(inputs.state)
    d_initial = torch.empty_like(inputs.state) if inputs.reset is not None else None
    d_read_bias = torch.empty_like(inputs.read_bias) if inputs.read_bias is not None else None
    d_states = torch.empty_like(states)
    read_weights, d_logits = inputs.q.new_empty(2, *inputs.log_decay.shape).unbind(0)
    d_scale = inputs.scale.new_empty(launch.num_chunks, launch.heads)  # summed later: atomics are not deterministic
    with launch.device():
        chunk_read_backward_kernel[launch.grid](
            q=inputs.q,
            k=inputs.k,
            v=inputs.v,
            scale=inputs.scale,
            read_bias=inputs.read_bias,
            states=states,
            d_out=d_out,
            read_weights=read_weights,
            d_logits=d_logits,
            d_log_decay=d_log_decay,
            d_scale=d_scale,
            d_read_bias=d_read_bias,
            d_states=d_states,
            BIAS=inputs.read_bias is not None,
            **launch.chunk_arguments("read_backward"),
        )
        chunk_scan_backward_kernel[launch.scan_grid](
            d_states=d_states,
            decays=decays,
            d_final=d_final,
            d_state=d_state,
            reset=inputs.reset,
            d_initial=d_initial,
            **launch.scan,
        )
        shared = {"states": states, "d_states": d_states, "d_log_decay": d_log_decay, "BLOCK": launch.slot_block}
        shared |= launch.chunk_arguments("bank_backward")
        chunk_bank_backward_kernel[launch.grid](
            x=inputs.q, y=inputs.k, weights=d_logits, d_x=d_q, d_y=d_k, VALUES=False, **shared
        )
        chunk_bank_backward_kernel[launch.grid](
            x=d_out, y=inputs.v, weights=read_weights, d_x=None, d_y=d_v, VALUES=True, **shared
        )
    return ScanGradients(
        q=d_q,
        k=d_k,
        v=d_v,
        log_decay=d_log_decay,
        scale=d_scale.sum(dim=0),
        state=d_state,
        initial=None if d_initial is None else d_initial.sum(dim=0),
        read_bias=d_read_bias,
    )
