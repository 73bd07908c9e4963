"""The slot scan as models call it: kernels on a GPU, the chunked form elsewhere."""

from __future__ import annotations

from torch import Tensor

from nsm_core.ops.dispatch import runs_kernels
from nsm_core.ops.slot_scan.chunked import slot_scan_chunked
from nsm_core.ops.slot_scan.operator import is_supported, slot_scan_kernel


def slot_scan(
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    scale: Tensor,
    state: Tensor,
    reset: Tensor | None = None,
    initial: Tensor | None = None,
    read_bias: Tensor | None = None,
    active: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """q, k, v [B,T,H,K]; log_decay [B,T,H,M] fp32 in [-5, 0]; scale [H]; state [B,H,M,2K] fp32.

    The other arguments are those of `slot_scan_reference`; `cu_seqlens` and `reset` exclude each other. Returns out
    [B,T,H,K] and the state after the last token, [B,H,M,2K] fp32, or [S,H,M,2K] for the S sequences of `cu_seqlens`.
    Raises ValueError on arguments that do not go together.
    """
    if cu_seqlens is not None and (reset is not None or q.shape[0] != 1):
        raise ValueError(f"cu_seqlens takes one row and no reset, got {q.shape[0]} rows")
    scan = slot_scan_kernel if runs_kernels(q) and is_supported(q, log_decay) else slot_scan_chunked
    return scan(
        q=q,
        k=k,
        v=v,
        log_decay=log_decay,
        scale=scale,
        state=state,
        reset=reset,
        initial=initial,
        read_bias=read_bias,
        active=active,
        cu_seqlens=cu_seqlens,
    )
