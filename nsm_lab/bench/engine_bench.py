"""`nsm bench engine`: the model of the settings in this process."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import torch

from nsm_core.model.bundled import find_checkpoint
from nsm_core.model.loader import load_checkpoint
from nsm_lab.bench.engine_load import EngineLoad, EngineWork, memory_figures
from nsm_lab.bench.machine import ProcessUse
from nsm_lab.bench.profile import profiled
from nsm_lab.bench.result import BenchResult
from nsm_lab.bench.run import BenchRun
from service.backends.local import LocalBackend
from service.settings import Settings

KIND = "engine"


async def bench_engine(
    settings: Settings, work: EngineWork, *, tell: Callable[[int], None], profile: Path | None = None
) -> BenchResult:
    """With `profile` a trace of one more repeat is written there.

    Raises CheckpointError, ConfigError, or what the engine gives as an error.
    """
    bench = BenchRun(KIND)
    if settings.num_threads is not None:
        torch.set_num_threads(settings.num_threads)
    before_mb = ProcessUse().rss_mb()  # the libraries are loaded, the model is not
    # Greedy texts after random prompts: how often they repeat themselves must not decide how fast a build is
    config = dataclasses.replace(settings.engine_config(), speculation="off")
    backend = LocalBackend(load_checkpoint(settings.model), config, executor=settings.executor)
    await backend.start()
    try:
        repeats = await EngineLoad(backend).run(work, tell=tell)
        if profile is not None:
            with profiled(profile):
                await EngineLoad(backend).run(dataclasses.replace(work, repeats=0), tell=tell)  # its warm-up
        weights_bytes = sum(file.stat().st_size for file in find_checkpoint(settings.model).glob("*.safetensors"))
        repeats.append(memory_figures(backend, weights_bytes=weights_bytes, before_mb=before_mb))
        model = backend.model
    finally:
        await backend.stop()
    return bench.result(
        repeats,
        subject={"model": model.name, "fingerprint": model.fingerprint, "numerics": model.numerics},
        options={
            **dataclasses.asdict(work),
            "executor": settings.executor,
            "num_threads": torch.get_num_threads(),
            "max_slots": settings.max_slots,
            "token_budget": settings.token_budget,
        },
    )
