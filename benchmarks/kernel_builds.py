"""Compiles the slot scan's kernels for a Hopper GPU on any machine: `python -m benchmarks.kernel_builds`.

One line a kernel, size and dtype: seconds to compile, shared memory, registers and bytes of stack a thread (what did
not fit into registers). Exits with 1 if a kernel does not compile or needs more shared memory than a block can have.
"""

from __future__ import annotations

import argparse
import itertools
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from nsm_core.ops.slot_scan import kernel_backward, kernel_forward, kernel_launch
from nsm_core.ops.slot_scan.operator import SUPPORTED_HEAD_DIMS, SUPPORTED_SLOTS, fits_shared_memory

TARGET = GPUTarget("cuda", 90, 32)
LARGEST_SHARED_BYTES = 227 * 1024
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
# Kernel, the name of its choice of warps (None: the scans' two), constants beside the shared ones.
KERNELS: tuple[tuple[Any, str | None, dict[str, Any]], ...] = (
    (kernel_forward.chunk_update_kernel, "update", {}),
    (kernel_forward.chunk_scan_kernel, None, {}),
    (kernel_forward.chunk_read_kernel, "read", {}),
    (kernel_backward.chunk_read_backward_kernel, "read_backward", {}),
    (kernel_backward.chunk_scan_backward_kernel, None, {}),
    (kernel_backward.chunk_bank_backward_kernel, "bank_backward", {"VALUES": False}),
    (kernel_backward.chunk_bank_backward_kernel, "bank_backward", {"VALUES": True}),
)
IN_PRODUCTS = {"q", "k", "v", "out", "d_out", "d_q", "d_k", "d_v", "x", "y", "weights", "d_x", "d_y"}
IN_PRODUCTS |= {"read_weights", "d_logits"}
INTEGERS = {"num_tokens", "chunks_per_row", "active_stride", "H"}
TYPES = {"chunk_table": "*i32", "row_chunks": "*i32", "active": "*u8", "reset": "*u8"}
GIVEN_WITH = {
    "active": "ACTIVE",
    "read_bias": "BIAS",
    "d_read_bias": "BIAS",
    "reset": "RESET",
    "initial": "RESET",
    "d_initial": "RESET",
    "chunk_table": "RAGGED",
    "row_chunks": "RAGGED",
}


def source(kernel: Any, constants: dict[str, Any], dtype: torch.dtype) -> ASTSource:
    signature, values, attributes = {}, {}, {}
    for index, name in enumerate(kernel.arg_names):
        if name in constants or not constants.get(GIVEN_WITH.get(name, ""), True):
            signature[name], values[(index,)] = "constexpr", constants.get(name)
        elif name in INTEGERS:
            signature[name] = "i32"
        else:
            of_products = "*bf16" if dtype == torch.bfloat16 else "*fp32"
            signature[name] = TYPES.get(name) or (of_products if name in IN_PRODUCTS else "*fp32")
            attributes[(index,)] = [["tt.divisibility", 16]]
    return ASTSource(kernel, signature, constexprs=values, attrs=attributes)


def registers(cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = subprocess.run([CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True)
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage.stdout)
    return f"{found[1]:>3s} registers {found[2]:>5s} B stack" if found else "registers unknown"


def build(
    kernel: Any, choice: str | None, slots: int, head_dim: int, dtype: torch.dtype, flags: dict[str, Any]
) -> bool:
    scan_rows = max(1, min(slots, kernel_launch.SCAN_ELEMENTS // (2 * head_dim)))
    constants = {"M": slots, "K": head_dim, "ROWS": scan_rows, "BLOCK": min(slots, kernel_launch.SLOT_BLOCK)}
    constants |= {"STAGES": kernel_launch.SCAN_STAGES, "PRECISION": "tf32x3", **flags}
    warps = 2 if choice is None else kernel_launch.num_warps(choice, slots, head_dim, dtype)
    label = (
        f"{kernel.__name__:28s} {slots:3d} slots x {head_dim:3d} {str(dtype).removeprefix('torch.'):8s} {warps} warps"
    )
    started = time.monotonic()
    try:
        options = {"num_warps": warps, "num_stages": 3 if choice is None else 1}
        compiled = triton.compile(source(kernel, constants, dtype), target=TARGET, options=options)
    except Exception as error:  # the compiler raises errors of many kinds: all mean that the kernel does not build
        print(f"{label}  FAILED {type(error).__name__}: {error}", flush=True)
        return False
    seconds, shared = time.monotonic() - started, compiled.metadata.shared
    fits = shared <= LARGEST_SHARED_BYTES
    verdict = "" if fits else "  TOO MUCH SHARED MEMORY"
    usage = registers(compiled.asm["cubin"])
    print(f"{label} {seconds:5.1f} s {shared / 1024:4.0f} KiB shared {usage}{verdict}", flush=True)
    return fits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--all", action="store_true", help="every supported size in both dtypes, not the base model's only"
    )
    parser.add_argument("--flags", default="", help="comma-separated: ACTIVE, BIAS, RESET, RAGGED")
    arguments = parser.parse_args()
    flags = {name: name in arguments.flags.split(",") for name in ("ACTIVE", "BIAS", "RESET", "RAGGED")}
    sizes, dtypes = [(64, 64)], [torch.bfloat16]
    if arguments.all:
        sizes = list(itertools.product(SUPPORTED_SLOTS, SUPPORTED_HEAD_DIMS))
        dtypes = [torch.bfloat16, torch.float32]
    built = [
        build(kernel, choice, slots, head_dim, dtype, {**flags, **constants})
        for dtype in dtypes
        for slots, head_dim in sizes
        if fits_shared_memory(slots=slots, head_dim=head_dim, dtype=dtype)
        for kernel, choice, constants in KERNELS
    ]
    sys.exit(0 if all(built) else 1)


if __name__ == "__main__":
    main()
