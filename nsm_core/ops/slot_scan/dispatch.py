"""The slot scan as models call it: kernels on a GPU, the chunked form elsewhere."""

from __future__ import annotations

from torch import Tensor

from nsm_core.ops.dispatch import runs_kernels
from nsm_core.ops.slot_scan.chunked import slot_scan_chunked
from nsm_core.ops.slot_scan.operator import is_supported, slot_scan_kernel


def slot_scan(
    *,
    v: Tensor,
    log_decay: Tensor,
    scale: Tensor,
    state: Tensor,
    q: Tensor | None = None,
    k: Tensor | None = None,
    reset: Tensor | None = None,
    initial: Tensor | None = None,
    read_bias: Tensor | None = None,
    active: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """q, k, v [B,T,H,K]; log_decay [B,T,H,M] fp32 in [-5, 0]; scale [H]; state [B,H,M,2K] fp32.

    Without q and k the slots have values only, [B,H,M,K], and `read_bias` says how they are read. The other arguments
    are those of `slot_scan_reference`; `cu_seqlens` and `reset` exclude each other. Returns out [B,T,H,K] and the state
    after the last token, fp32 like `state`, or [S,...] for the S sequences of `cu_seqlens`.
    Raises ValueError on arguments that do not go together.
    """
    if cu_seqlens is not None and (reset is not None or v.shape[0] != 1):
        raise ValueError(f"cu_seqlens takes one row and no reset, got {v.shape[0]} rows")
    if (q is None) != (k is None) or (q is None and read_bias is None):
        raise ValueError("slots are read by q and k, by a read_bias, or by both")
    if q is not None and k is not None and runs_kernels(q) and is_supported(q, log_decay):
        return slot_scan_kernel(
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
    return slot_scan_chunked(
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
