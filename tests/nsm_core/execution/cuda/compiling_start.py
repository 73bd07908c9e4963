"""Compiles the kernels of some launches in other processes, and tells which of them this process then finds.

Without a GPU: the compiler makes them for one all the same. Its cache is the directory in TRITON_CACHE_DIR.
"""

from __future__ import annotations

import functools
import json
import sys

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from nsm_core.execution.cuda.compiling import compile_ahead, variants_of
from nsm_core.execution.cuda.compiling_process import NoDevice
from nsm_core.execution.cuda.kernels.linear import make_stream
from nsm_core.execution.cuda.kernels.overlap import resolve_inputs
from nsm_core.execution.cuda.kernels.rows import final_norm
from nsm_core.execution.cuda.start_note import StartNote


def launch() -> None:
    """Three kernels, one of them twice."""
    ids = torch.zeros(3, 2, dtype=torch.int64)
    resolve_inputs(given=ids, sampled=ids[0], pauses=ids.to(torch.uint8), rows=ids[1], ids=ids[2], no_row=-1)
    for width in (64, 128, 64):
        stream = make_stream(2, width, torch.bfloat16, ids.device)
        hidden = torch.zeros(2, width, dtype=torch.bfloat16)
        final_norm(rows=ids[0], x=stream, gain=torch.ones(width), hidden=hidden, eps=1e-6, is_chained=False)


def main() -> None:
    driver.set_active(NoDevice(GPUTarget("cuda", 90, 32)))
    variants = variants_of(launch)
    num_compiled, rehearsed = compile_ahead(launch, num_processes=2), list[str]()
    for subject in ("one", "one", "other"):
        compile_ahead(functools.partial(rehearsed.append, subject), note=StartNote.of(subject), num_processes=2)
    hits: list[bool] = []
    knobs.compilation.listener = lambda *, cache_hit, **_: hits.append(cache_hit)
    for variant in variants:
        variant.compile()
    json.dump({"variants": len(variants), "compiled": num_compiled, "hits": hits, "rehearsed": rehearsed}, sys.stdout)


if __name__ == "__main__":
    main()
