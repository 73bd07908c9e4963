"""Launches that are recorded once, as a CUDA graph, and replayed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def record(work: Callable[[], None], device: torch.device, *, memory: Any = None) -> torch.cuda.CUDAGraph:
    """The launches of `work`, which runs once before: that compiles its kernels. Waits for the device.

    `memory`: `torch.cuda.graph_pool_handle()` that graphs share which are never replayed at the same time.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(device):
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            work()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, pool=memory, stream=stream, capture_error_mode="thread_local"):
            work()
    return graph
