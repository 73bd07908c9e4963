"""The keyed scan as models call it: kernels on a GPU, the chunked form elsewhere."""

from __future__ import annotations

from torch import Tensor

from nsm_core.ops.dispatch import runs_kernels
from nsm_core.ops.keyed_scan.chunked import keyed_scan_chunked
from nsm_core.ops.keyed_scan.operator import is_supported, keyed_scan_kernel


def keyed_scan(
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    strength: Tensor,
    log_decay: Tensor,
    state: Tensor,
    reset: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The arguments are those of `keyed_scan_reference`. Returns y [B,T,H,V] and the state after the last token."""
    scan = keyed_scan_kernel if runs_kernels(q) and is_supported(q, v) else keyed_scan_chunked
    return scan(q=q, k=k, v=v, strength=strength, log_decay=log_decay, state=state, reset=reset)
