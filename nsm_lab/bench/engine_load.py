"""The engine in this process: decode, prefill, sessions, memory."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Protocol

from nsm_core.engine.request import EndState, Event, Finished, GenerationRequest, Resume, TokenEvent
from nsm_core.model_info import ModelInfo
from nsm_core.sampling.params import SamplingParams
from nsm_core.stats import EngineStats
from nsm_core.tokenizer import Tokenizer
from nsm_lab.bench.machine import MIB, ProcessUse
from nsm_lab.bench.times import RequestTimes, load_figures

PROMPT_TOKENS = 16  # of requests whose decoding is measured, and of the turn that continues a session


class MeasuredGeneration(Protocol):
    """A request under way."""

    def batches(self) -> AsyncIterator[list[Event]]:
        """Its events, in lists of those that are ready together. The last event is Finished."""
        ...


class MeasuredEngine(Protocol):
    """An engine in this process. The gateway's local backend is one."""

    @property
    def model(self) -> ModelInfo: ...

    @property
    def tokenizer(self) -> Tokenizer: ...

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    def submit(self, request: GenerationRequest) -> MeasuredGeneration: ...

    def stats(self) -> EngineStats: ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineWork:
    """The work of each repeat.

    `batches`: requests that run together; `num_tokens`: that each samples; `lengths`: tokens of prompts and sessions.
    """

    batches: tuple[int, ...]
    num_tokens: int
    lengths: tuple[int, ...]
    repeats: int


class EngineLoad:
    """Sends requests to an engine that runs in this process."""

    def __init__(self, engine: MeasuredEngine) -> None:
        self._engine = engine
        self._use = ProcessUse()
        self._random = random.Random(0)
        self._numbers = itertools.count()

    async def run(self, work: EngineWork, *, on_progress: Callable[[int], None]) -> list[dict[str, float]]:
        """The figures of each repeat; a warm-up runs before. `on_progress` gets the number of repeats done."""
        await self._repeat(work)
        repeats = []
        for number in range(work.repeats):
            repeats.append(await self._repeat(work))
            on_progress(number + 1)
        return repeats

    async def _repeat(self, work: EngineWork) -> dict[str, float]:
        figures: dict[str, float] = {}
        for batch in work.batches:
            figures |= await self._decode(batch, work.num_tokens)
        for length in work.lengths:
            figures |= await self._prefill_and_session(length)
        return figures

    async def _decode(self, batch: int, num_tokens: int) -> dict[str, float]:
        requests = [self._request(PROMPT_TOKENS, max_tokens=num_tokens) for _ in range(batch)]
        cpu_s = self._use.cpu_s()
        times = await asyncio.gather(*(self._read(request) for request in requests))
        return load_figures(f"decode.{batch}", [taken for taken, _ in times], cpu_s=self._use.cpu_s() - cpu_s)

    async def _prefill_and_session(self, length: int) -> dict[str, float]:
        """Reads a text from its start, then continues it from its state with a few new tokens."""
        read, cpu_s = await self._timed(self._request(length, max_tokens=1, keep_state=True))
        end = read[1].end_state
        if end is None:
            raise RuntimeError("the engine kept no state")
        resumed, resumed_cpu_s = await self._timed(self._request(PROMPT_TOKENS, max_tokens=1, resume=self._resume(end)))
        ttft_s = read[0].ttft_s
        return {
            f"prefill.{length}.tokens_per_s": length / ttft_s,
            f"prefill.{length}.tokens_per_cpu_s": length / cpu_s,
            f"session.{length}.reread_ms": ttft_s * 1e3,
            f"session.{length}.resumed_ms": resumed[0].ttft_s * 1e3,
            f"session.{length}.reread_cpu_ms": cpu_s * 1e3,
            f"session.{length}.resumed_cpu_ms": resumed_cpu_s * 1e3,
            f"session.{length}.speedup": ttft_s / resumed[0].ttft_s,
            f"session.{length}.state_mb": len(end.state) / MIB,
        }

    async def _timed(self, request: GenerationRequest) -> tuple[tuple[RequestTimes, Finished], float]:
        cpu_s = self._use.cpu_s()
        read = await self._read(request)
        return read, max(self._use.cpu_s() - cpu_s, 1e-9)

    async def _read(self, request: GenerationRequest) -> tuple[RequestTimes, Finished]:
        """Reads one request to its end. Raises the engine's error."""
        times = RequestTimes(started=time.perf_counter())
        async for events in self._engine.submit(request).batches():
            now = time.perf_counter()
            times.pieces += [now] * sum(isinstance(event, TokenEvent) for event in events)
            last = events[-1]
            if isinstance(last, Finished):
                if last.error is not None:
                    raise last.error
                times.ended, times.num_tokens = now, last.completion_tokens
                return times, last
        raise RuntimeError("the engine ended a request without Finished")

    def _request(
        self, length: int, *, max_tokens: int, resume: Resume | None = None, keep_state: bool = False
    ) -> GenerationRequest:
        return GenerationRequest(
            request_id=f"bench-{next(self._numbers)}",
            prompt_ids=tuple(self._ids(length)),
            sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
            resume=resume,
            keep_state=keep_state,
        )

    def _ids(self, number: int) -> Iterator[int]:
        vocab_size = self._engine.tokenizer.vocab_size
        return (self._random.randrange(1, vocab_size) for _ in range(number))

    def _resume(self, end: EndState) -> Resume:
        return Resume(
            state=end.state,
            position=end.position,
            fingerprint=self._engine.model.fingerprint,
            generated_counts=end.generated_counts,
        )


def memory_figures(engine: MeasuredEngine, *, weights_bytes: int, before_mb: float) -> dict[str, float]:
    """Resident memory of this process. `before_mb`: before the model was loaded; the ratio counts only later growth."""
    rss_mb = ProcessUse().rss_mb()
    needed_mb = (weights_bytes + engine.stats().state_pool_bytes) / MIB
    return {
        "memory.process.rss_mb": rss_mb,
        "memory.process.model_mb": max(0.0, rss_mb - before_mb),
        "memory.process.weights_and_pool_mb": needed_mb,
        "memory.process.ratio": max(0.0, rss_mb - before_mb) / needed_mb,
    }
