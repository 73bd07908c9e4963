"""The state scan of a text that is read from its start: kernels on a GPU, the plain form elsewhere."""

from __future__ import annotations

from torch import Tensor

from nsm_core.rwkv7.time_mix import state_scan
from nsm_lab.baselines.rwkv7_scan.operator import has_kernel, scan_kernel


def trained_scan(*, r: Tensor, w: Tensor, k: Tensor, v: Tensor, removed: Tensor, rate: Tensor) -> Tensor:
    """As `state_scan` from a state of zeros: all [B,T,H,K] fp32 -> y [B,T,H,K]."""
    if has_kernel(r):
        return scan_kernel(r=r, w=w, k=k, v=v, removed=removed, added=removed * rate)[0]
    start = r.new_zeros(r.shape[0], *r.shape[2:], v.shape[-1])
    return state_scan(r=r, w=w, k=k, v=v, removed=removed, rate=rate, initial=start)[0]
