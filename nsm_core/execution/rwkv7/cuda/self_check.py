"""A check of RWKV-7's freshly compiled kernels on their device, before they serve requests."""

from __future__ import annotations

import dataclasses
import itertools

import torch

from nsm_core.execution.cuda.self_check import failed_bits, failed_numbers, read_from_start
from nsm_core.execution.rwkv7.cuda.executor import Rwkv7CudaExecutor
from nsm_core.rwkv7.model import Rwkv7Model

CHECKED_LAYERS = 2  # compared with the plain model in fp32: of a whole one there may be no memory
CUTS = (0, 1, 3, 20, 21, 40)  # of a text of so many tokens


def failed_check(executor: Rwkv7CudaExecutor, model: Rwkv7Model) -> str | None:
    """None if the check passes. No row of the pool may be leased.

    A row must have the same bits beside others and alone, every time and however its text is cut; the first layers must
    be close to the plain model.
    """
    first = _first_layers(model)
    options = dataclasses.replace(executor.options, graphs=False)
    return (
        failed_bits(executor, model.num_ids)
        or _failed_cuts(executor, model.num_ids)
        or failed_numbers(Rwkv7CudaExecutor(first, num_rows=3, options=options), first, model.num_ids)
    )


def _first_layers(model: Rwkv7Model) -> Rwkv7Model:
    num_layers = min(CHECKED_LAYERS, model.config.num_layers)
    config = dataclasses.replace(model.config, num_layers=num_layers)
    return Rwkv7Model(config, model.tensors, model.device, model.num_ids)


@torch.inference_mode()
def _failed_cuts(executor: Rwkv7CudaExecutor, vocab_size: int) -> str | None:
    text = torch.randint(vocab_size, (CUTS[-1],), generator=torch.Generator().manual_seed(2)).tolist()
    (whole,) = read_from_start(executor, [text])
    executor.pool.lease(0)
    executor.pool.write(0, executor.initial)
    try:
        parts = [text[start:end] for start, end in itertools.pairwise(CUTS)]
        hidden = [executor.step((0,), part) if len(part) == 1 else executor.read((0,), (part,))[0] for part in parts]
    finally:
        executor.pool.free(0)
    # without a GPU some sums go through the library, where they depend on shapes
    if whole.is_cuda and not torch.cat(hidden).equal(whole):
        return f"a text of {len(text)} tokens has other bits in {len(parts)} parts than at once"
    return None
