"""Grids, buffers and fixed configurations of the keyed scan's kernels."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nsm_core.ops.keyed_scan.kernel_backward import (
    chunk_read_backward_kernel,
    chunk_solve_backward_kernel,
    correction_gradient_kernel,
    state_walk_backward_kernel,
)
from nsm_core.ops.keyed_scan.kernel_forward import chunk_read_kernel, chunk_solve_kernel, state_walk_kernel
from nsm_core.ops.slot_scan.chunked import CHUNK_LEN

WALK_BLOCK = 32  # columns of a state that one program carries: few, so that one sequence fills a device


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyedInputs:
    """Contiguous tensors of one call: q, k, v in one of bf16 or fp32, the others in fp32."""

    q: Tensor  # [B,T,H,K]
    k: Tensor
    v: Tensor  # [B,T,H,V]
    strength: Tensor  # [B,T,H]
    log_decay: Tensor
    state: Tensor  # [B,H,K,V]
    reset: Tensor | None  # [B,T/64] uint8


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyedResults:
    """`out` [B,T,H,V] and `final` [B,H,K,V]; the rest is for the backward pass."""

    out: Tensor
    final: Tensor
    inverse: Tensor  # [chunks,H,C,C]
    of_state: Tensor  # [B,T,H,K]
    states: Tensor  # [chunks,H,K,V]: before each chunk
    corrections: Tensor  # [B,T,H,V]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyedGradients:
    """Of the inputs of the same names."""

    q: Tensor
    k: Tensor
    v: Tensor
    strength: Tensor
    log_decay: Tensor
    state: Tensor


class _Launch:
    def __init__(self, inputs: KeyedInputs) -> None:
        rows, num_tokens, self.heads, self.width = inputs.q.shape
        self.value_width = inputs.v.shape[-1]
        chunks_per_row = -(-num_tokens // CHUNK_LEN)
        self.num_chunks = rows * chunks_per_row
        self.grid = (self.num_chunks * self.heads,)
        block = min(WALK_BLOCK, self.value_width)
        self.walk_grid = (rows * self.heads, self.value_width // block)
        self._device = inputs.q.device
        self._common = {
            "num_tokens": num_tokens,
            "chunks_per_row": chunks_per_row,
            "H": self.heads,
            "K": self.width,
            "V": self.value_width,
            "PRECISION": "tf32x3",  # of fp32 products; bf16 ones have only one
        }
        self.walk = {**self._common, "BLOCK": block, "RESET": inputs.reset is not None, "num_stages": 2}
        self.walk["num_warps"] = 4 if self.width >= 64 else 2

    def chunk(self, num_warps: int) -> dict[str, Any]:
        """Arguments of a kernel that works on one chunk."""
        is_small = min(self.width, self.value_width) < 64
        return {**self._common, "num_warps": 2 if is_small else num_warps, "num_stages": 1}

    def device(self) -> AbstractContextManager[Any]:
        """Kernels start on the current device, which need not be the tensors'."""
        return torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext()


def run_forward(inputs: KeyedInputs) -> KeyedResults:
    launch = _Launch(inputs)
    q, k, v = inputs.q, inputs.k, inputs.v
    matrices = (launch.num_chunks, launch.heads)
    results = KeyedResults(
        out=torch.empty_like(v),
        final=torch.empty_like(inputs.state),
        inverse=q.new_empty(*matrices, CHUNK_LEN, CHUNK_LEN),
        of_state=torch.empty_like(k),
        states=q.new_empty(*matrices, launch.width, launch.value_width),
        corrections=torch.empty_like(v),
    )
    if q.numel() == 0:
        results.final.copy_(inputs.state)
        return results
    shared = {"k": k, "log_decay": inputs.log_decay}
    own = torch.empty_like(v)
    with launch.device():
        chunk_solve_kernel[launch.grid](
            **shared, v=v, strength=inputs.strength, inverse=results.inverse, of_state=results.of_state, own=own,
            **launch.chunk(4),
        )  # fmt: skip
        state_walk_kernel[launch.walk_grid](
            **shared, of_state=results.of_state, own=own, state=inputs.state, reset=inputs.reset,
            states=results.states, corrections=results.corrections, final=results.final, **launch.walk,
        )  # fmt: skip
        chunk_read_kernel[launch.grid](
            **shared, q=q, states=results.states, corrections=results.corrections, out=results.out, **launch.chunk(8)
        )
    return results


def run_backward(
    inputs: KeyedInputs,
    *,
    inverse: Tensor,
    of_state: Tensor,
    states: Tensor,
    corrections: Tensor,
    d_out: Tensor,
    d_final: Tensor,
) -> KeyedGradients:
    launch = _Launch(inputs)
    q, k, v = inputs.q, inputs.k, inputs.v
    grads = KeyedGradients(
        q=torch.empty_like(q),
        k=torch.empty_like(k),
        v=torch.empty_like(v),
        strength=torch.empty_like(inputs.strength),
        log_decay=torch.empty_like(inputs.log_decay),
        state=torch.empty_like(inputs.state),
    )
    shared = {"k": k, "log_decay": inputs.log_decay}
    d_corrections, d_of_state, d_states = torch.empty_like(v), torch.empty_like(k), torch.empty_like(states)
    d_k, d_total = torch.empty_like(k, dtype=torch.float32), torch.empty_like(inputs.log_decay)
    with launch.device():
        correction_gradient_kernel[launch.grid](
            **shared, q=q, d_out=d_out, d_corrections=d_corrections, **launch.chunk(4)
        )
        state_walk_backward_kernel[launch.walk_grid](
            **shared, q=q, of_state=of_state, d_out=d_out, d_final=d_final, reset=inputs.reset,
            d_corrections=d_corrections, d_states=d_states, d_state=grads.state, **launch.walk,
        )  # fmt: skip
        chunk_read_backward_kernel[launch.grid](
            **shared, q=q, states=states, corrections=corrections, d_out=d_out, d_corrections=d_corrections,
            d_states=d_states, d_q=grads.q, d_k=d_k, d_of_state=d_of_state, d_total=d_total, **launch.chunk(8),
        )  # fmt: skip
        chunk_solve_backward_kernel[launch.grid](
            **shared, v=v, strength=inputs.strength, inverse=inverse, d_own=d_corrections, d_of_state=d_of_state,
            d_total=d_total, d_k_part=d_k, d_k=grads.k, d_v=grads.v, d_strength=grads.strength,
            d_log_decay=grads.log_decay, **launch.chunk(8),
        )  # fmt: skip
    return grads
