"""Kernels of a step that begin while the one before them still runs: programmatic dependent launch (since Hopper).

The rule of every kernel here: it waits, and only then lets the next one begin. So a kernel that has begun may read,
before it waits itself, whatever was written two kernels ago or earlier: weights, states, positions. What the kernel
just before wrote is there after the wait. No program may end without having waited: the next kernel relies on it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

LINE = 128  # bytes that the cache fetches at once


@triton.jit
def wait_for_previous(CHAINED: tl.constexpr):
    """Everything that earlier kernels wrote is there; the next kernel may begin."""
    if CHAINED:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()


@triton.jit
def let_next_begin(CHAINED: tl.constexpr):
    """For a kernel that reads nothing of the one just before it, and so runs beside it: see `end_beside`."""
    if CHAINED:
        cuda.gdc_launch_dependents()


@triton.jit
def end_beside(CHAINED: tl.constexpr):
    """The last thing such a kernel does: whoever waits for it has waited for both."""
    if CHAINED:
        cuda.gdc_wait()


@triton.jit
def prefetch(pointers):
    """Lines of memory come nearer, to the cache that all programs share."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
        "=r,l",
        [pointers.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


def may_chain(device: torch.device) -> bool:
    """Whether the device has such launches."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def chained(is_chained: bool) -> dict[str, bool]:
    """Options of a launch."""
    return {"CHAINED": True, "launch_pdl": True} if is_chained else {"CHAINED": False}
