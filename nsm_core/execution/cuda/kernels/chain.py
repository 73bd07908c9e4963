"""Kernels that begin while the one before still runs: programmatic dependent launch (since Hopper).

Every kernel waits first, and only then lets the next one begin. So before its own wait a kernel may read everything
written two kernels ago or earlier: weights, states, positions. The writes of the kernel just before are visible after
the wait. No program may end without having waited: the next kernel relies on it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

LINE = 128  # bytes of a cache line


@triton.jit
def wait_for_previous(CHAINED: tl.constexpr):
    """Waits until the writes of earlier kernels are visible; then the next kernel may begin."""
    if CHAINED:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()


@triton.jit
def let_next_begin(CHAINED: tl.constexpr):
    """For a kernel that does not read the results of the one just before, and runs beside it: see `end_beside`."""
    if CHAINED:
        cuda.gdc_launch_dependents()


@triton.jit
def end_beside(CHAINED: tl.constexpr):
    """The last call of such a kernel: waiting for it then waits for both."""
    if CHAINED:
        cuda.gdc_wait()


@triton.jit
def prefetch(pointers):
    """Prefetches lines of memory into the L2 cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
        "=r,l",
        [pointers.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


def may_chain(device: torch.device) -> bool:
    """Whether the device supports such launches."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def chained(is_chained: bool) -> dict[str, bool]:
    """Launch options."""
    return {"CHAINED": True, "launch_pdl": True} if is_chained else {"CHAINED": False}
