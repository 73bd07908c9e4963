"""`nsm bench components`: CPU time of the parts of a model (eager, fp32, on the CPU)."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from nsm_core.model.loader import load_checkpoint
from nsm_core.model.nsm import NsmModel
from nsm_lab.baselines.register import register_baselines
from nsm_lab.bench.parts import PARTS, observed_parts
from nsm_lab.bench.profile import profiled
from nsm_lab.bench.result import BenchResult
from nsm_lab.bench.run import BenchRun

KIND = "components"
STEPS = 8  # of a decoding batch in each repeat
SEED = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ComponentWork:
    """The work of each repeat: steps of `batches` rows, and one prompt of each of the `lengths`, in tokens."""

    batches: tuple[int, ...]
    lengths: tuple[int, ...]
    repeats: int


class Stopwatch:
    """Seconds that each part took, without those of parts inside it."""

    def __init__(self, clock: Callable[[], float] = time.process_time) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._clock = clock
        self._open: list[str] = []
        self._since = 0.0

    @contextlib.contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        self._charge()
        self._open.append(part)
        try:
            yield
        finally:
            self._charge()
            self._open.pop()

    def _charge(self) -> None:
        now = self._clock()
        if self._open:
            self.seconds[self._open[-1]] += now - self._since
        self._since = now


def bench_components(
    model: Path | None,
    work: ComponentWork,
    *,
    num_threads: int | None,
    profile: Path | None,
    on_progress: Callable[[int], None],
) -> BenchResult:
    """With `profile` a trace of one more repeat is written there. Raises CheckpointError, ConfigError or OSError."""
    bench = BenchRun(KIND)
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    register_baselines()
    loaded = load_checkpoint(model)
    _figures(loaded.model, work)  # a warm-up
    repeats = []
    for number in range(work.repeats):
        repeats.append(_figures(loaded.model, work))
        on_progress(number + 1)
    if profile is not None:
        with profiled(profile):
            for _, run, _ in _runs(loaded.model, work):
                run()
    return bench.result(
        repeats,
        subject={"model": loaded.name, "fingerprint": loaded.fingerprint, "numerics": loaded.numerics},
        options={**dataclasses.asdict(work), "num_threads": torch.get_num_threads()},
    )


def _figures(model: NsmModel, work: ComponentWork) -> dict[str, float]:
    figures: dict[str, float] = {}
    for name, run, times in _runs(model, work):
        watch = Stopwatch()
        with observed_parts(watch):
            run()
        seen = [part for part in PARTS if part in watch.seconds]
        figures |= {f"{name}.{part}_cpu_ms": watch.seconds[part] * 1e3 / times for part in seen}
        figures[f"{name}.all_cpu_ms"] = sum(watch.seconds.values()) * 1e3 / times
    return figures


def _runs(model: NsmModel, work: ComponentWork) -> Iterator[tuple[str, Callable[[], None], int]]:
    """Name of each measurement, a function that runs it, and the number of times that one call runs it."""
    generator, vocab_size = torch.Generator().manual_seed(SEED), model.config.vocab_size
    for batch in work.batches:
        ids = torch.randint(vocab_size, (STEPS, batch), generator=generator)
        yield f"decode.{batch}", functools.partial(_decode, model, ids), STEPS
    for length in work.lengths:
        ids = torch.randint(vocab_size, (1, length), generator=generator)
        yield f"prefill.{length}", functools.partial(_prefill, model, ids), 1


@torch.inference_mode()
def _decode(model: NsmModel, ids: torch.Tensor) -> None:
    state = model.initial_state(ids.shape[1])
    for row in ids:
        hidden, state = model.step(row, state)
        model.logits(hidden)


@torch.inference_mode()
def _prefill(model: NsmModel, ids: torch.Tensor) -> None:
    hidden, _ = model(ids, model.initial_state(1))
    model.logits(hidden[:, -1])
