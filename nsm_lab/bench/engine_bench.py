"""`nsm bench engine`: a model in this process."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from nsm_core.model.bundled import find_checkpoint
from nsm_lab.bench.engine_load import EngineLoad, EngineWork, MeasuredEngine, memory_figures
from nsm_lab.bench.machine import ProcessUse
from nsm_lab.bench.profile import profiled
from nsm_lab.bench.result import BenchResult
from nsm_lab.bench.run import BenchRun

KIND = "engine"


async def bench_engine(
    make_engine: Callable[[], MeasuredEngine],
    model: Path | None,
    work: EngineWork,
    *,
    options: Mapping[str, Any],
    on_progress: Callable[[int], None],
    profile: Path | None = None,
) -> BenchResult:
    """Measures the engine that `make_engine` loads from the directory `model` (None: the bundled one).

    `options`: how the engine was configured, for the result. `on_progress` gets the number of repeats done.
    With `profile` a trace of one more repeat is written there.

    Raises CheckpointError, ConfigError or the engine's error.
    """
    bench = BenchRun(KIND)
    before_mb = ProcessUse().rss_mb()  # the libraries are loaded, the model is not
    engine = make_engine()
    await engine.start()
    try:
        repeats = await EngineLoad(engine).run(work, on_progress=on_progress)
        if profile is not None:
            with profiled(profile):
                await EngineLoad(engine).run(
                    dataclasses.replace(work, repeats=0), on_progress=on_progress
                )  # its warm-up
        weights_bytes = sum(file.stat().st_size for file in find_checkpoint(model).glob("*.safetensors"))
        repeats.append(memory_figures(engine, weights_bytes=weights_bytes, before_mb=before_mb))
        measured = engine.model
    finally:
        await engine.stop()
    return bench.result(
        repeats,
        subject={"model": measured.name, "fingerprint": measured.fingerprint, "numerics": measured.numerics},
        options={**dataclasses.asdict(work), **options, "num_threads": torch.get_num_threads()},
    )
