"""CUDA graphs: launches that are recorded once and replayed."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch


def record(work: Callable[[], None], device: torch.device, *, memory: Any = None) -> torch.cuda.CUDAGraph:
    """A graph of the launches of `work`, which runs once before to compile its kernels. Waits for the device.

    `memory`: a `torch.cuda.graph_pool_handle()` shared by graphs that are never replayed at the same time.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        work()
        torch.cuda.synchronize()
        # not by `torch.cuda.graph`: it gives the memory of all caches back first, which takes as long as the rest
        with _without_collection():
            graph.capture_begin(memory, "thread_local")
            try:
                work()
            finally:
                graph.capture_end()
    return graph


@contextlib.contextmanager
def _without_collection() -> Iterator[None]:
    """No collection of objects begins meanwhile: one that destroys another graph, of an executor that is gone, would
    end the recording.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
