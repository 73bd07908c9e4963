"""`nsm bench http`: any OpenAI-compatible server."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from nsm_core.errors import NsmError
from nsm_lab.bench.http_client import Endpoint
from nsm_lab.bench.http_load import HttpLoad, HttpWork
from nsm_lab.bench.machine import ProcessUse
from nsm_lab.bench.result import BenchResult
from nsm_lab.bench.run import BenchRun

KIND = "http"


async def bench_http(
    endpoint: Endpoint, work: HttpWork, *, pid: int | None, on_progress: Callable[[int], None]
) -> BenchResult:
    """`pid`: of the server on this machine, for its CPU seconds and memory. Raises ConfigError or NsmError."""
    bench = BenchRun(KIND)
    use = None if pid is None else ProcessUse(pid)
    repeats = await HttpLoad(endpoint, work, use).run(on_progress=on_progress)
    return bench.result(
        repeats,
        subject={"url": endpoint.url, "models": await _models(endpoint)},
        options={**dataclasses.asdict(work), "has_pid": pid is not None},
    )


async def _models(endpoint: Endpoint) -> list[Any]:
    """Ids of the models that the server lists; empty if it has no list."""
    try:
        listed = await endpoint.json("GET", "/v1/models")
        return [model["id"] for model in listed["data"]]
    except (NsmError, KeyError, TypeError):
        return []
