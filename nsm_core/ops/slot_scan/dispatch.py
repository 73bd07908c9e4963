"""The slot scan that models call: kernels on a GPU, the chunked form elsewhere."""

from __future__ import annotations

from torch import Tensor

from nsm_core.ops.dispatch import runs_kernels
from nsm_core.ops.slot_scan.chunked import slot_scan_chunked
from nsm_core.ops.slot_scan.inputs import ScanInputs
from nsm_core.ops.slot_scan.operator import is_supported, slot_scan_kernel


def slot_scan(inputs: ScanInputs) -> tuple[Tensor, Tensor]:
    """Returns out [B,T,H,K] and the state after the last token (of each sequence), fp32 like `inputs.state`.

    `slot_scan_reference` is its specification. Raises ValueError for inputs that exclude each other.
    """
    q, k, v = inputs.q, inputs.k, inputs.v
    if inputs.cu_seqlens is not None and (inputs.reset is not None or v.shape[0] != 1):
        raise ValueError(f"cu_seqlens takes one row and no reset, got {v.shape[0]} rows")
    if (q is None) != (k is None) or (q is None and inputs.read_bias is None):
        raise ValueError("slots are read by q and k, by a read_bias, or by both")
    if q is not None and k is not None and runs_kernels(q) and is_supported(q, inputs.log_decay):
        return slot_scan_kernel(inputs)
    return slot_scan_chunked(inputs)
