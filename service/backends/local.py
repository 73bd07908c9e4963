"""The model in this process, on an engine thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Sequence

from nsm_core.config import EngineConfig
from nsm_core.energy.meter import EnergyMeter
from nsm_core.engine.async_engine import AsyncEngine, GenerationHandle, TakeTokens, TakeTokensNow
from nsm_core.engine.engine import Engine
from nsm_core.engine.request import GenerationRequest, NamedState
from nsm_core.engine.stream_pace import StreamPace
from nsm_core.execution.choose import choose_executor
from nsm_core.execution.names import ExecutorName
from nsm_core.formats.one_thread import one_thread
from nsm_core.grammars.grammar import Grammar
from nsm_core.heap import keep_freed_memory, trim_heap
from nsm_core.inspection.probe import probe_of
from nsm_core.inspection.reading import inspect
from nsm_core.inspection.report import LayerReport
from nsm_core.inspection.shared_copy import shared_copy
from nsm_core.inspection.summary import summarise
from nsm_core.loaded_model import LoadedModel, SequenceModel
from nsm_core.model.nsm import NsmModel
from nsm_core.model.observer import observer_of
from nsm_core.model_info import ModelInfo
from nsm_core.state.inspection import inspect_state
from nsm_core.state.report import Detail, StateReport
from nsm_core.stats import EngineStats
from nsm_core.tokenizer import Tokenizer


class LocalBackend:
    """An InferenceBackend on an AsyncEngine."""

    def __init__(
        self,
        loaded: LoadedModel[SequenceModel],
        config: EngineConfig,
        *,
        executor: ExecutorName = "auto",
        meter: EnergyMeter | None = None,
        max_interval_s: float = 0.0,
    ) -> None:
        """Keeps nothing of `loaded` that the executor does not need.

        `meter`: of the energy that requests are charged, and closed with the backend. `max_interval_s`: see StreamPace.

        Raises ConfigError where the executor that was asked for cannot be had.
        """
        chosen = choose_executor(loaded, executor)
        self._tokenizer = loaded.tokenizer
        self._served = chosen.model
        self._max_requests = config.max_requests
        with one_thread():
            engine = Engine(
                chosen.model,
                loaded.tokenizer,
                fingerprint=loaded.fingerprint,
                config=config,
                executor=chosen.factory,
                meter=meter,
                observer=observer_of(chosen.model),
                probe=probe_of(chosen.model),
            )
        self._model = dataclasses.replace(loaded.info, numerics=chosen.numerics, replays_exactly=engine.replays_exactly)
        if engine.replays_singly:
            self._model = dataclasses.replace(self._model, replays_exactly=True, replays_singly=True)
        self._held = engine.held
        self._is_on_gpu = loaded.device.type == "cuda"
        self._engine = AsyncEngine(engine, pace=StreamPace(max_interval_s))
        self._meter = meter
        self._inspecting = asyncio.Lock()

    @property
    def model(self) -> ModelInfo:
        return self._model

    @property
    def tokenizer(self) -> Tokenizer:
        return self._tokenizer

    @property
    def max_requests(self) -> int:
        return self._max_requests

    async def start(self) -> None:
        trim_heap()  # whoever loaded the model has let it go by now
        keep_freed_memory()
        await self._engine.start()

    async def stop(self) -> None:
        await self._engine.stop()
        if self._meter is not None:
            self._meter.close()

    def require_room(self) -> None:
        self._engine.require_room()

    def submit(self, request: GenerationRequest, *, tag: int | None = None) -> GenerationHandle:
        """`tag`: see Engine.add."""
        return self._engine.submit(request, tag=tag)

    def listen_tokens(self, listener: TakeTokens, *, now: TakeTokensNow | None = None) -> None:
        """See AsyncEngine."""
        self._engine.listen_tokens(listener, now=now)

    async def check_grammar(self, grammar: Grammar) -> None:
        await self._engine.check_grammar(grammar)

    @property
    def holds_states(self) -> bool:
        """On a CPU the bytes are as near."""
        return self._is_on_gpu

    async def fetch_state(self, number: int) -> bytes | None:
        return await asyncio.to_thread(self._held.pack, number)

    async def find_state(self, name: str) -> NamedState | None:
        return self._held.find(name)

    def name_state(self, name: str, number: int, about: bytes) -> None:
        self._held.name(name, number, about)

    def forget_state(self, name: str) -> None:
        self._held.forget(name)

    def drop_state(self, number: int) -> None:
        self._held.drop(number)

    async def inspect_state(
        self, state: bytes | None, *, detail: Detail = Detail.LAYER, layer: int | None = None
    ) -> StateReport:
        model = self._served
        return await asyncio.to_thread(
            lambda: inspect_state(model.state_spec, state, model.initial_state(1), detail=detail, layer=layer)
        )

    async def inspect_text(
        self, state: bytes | None, ids: Sequence[int], *, has_tokens: bool = False
    ) -> tuple[LayerReport, ...]:
        async with self._inspecting:
            return await asyncio.to_thread(_inspect_text, self._served, state, ids, has_tokens)

    def is_alive(self) -> bool:
        """False once its engine has ended: only another process can help then."""
        return self._engine.is_alive()

    def is_ready(self) -> bool:
        return self._engine.is_ready()

    def stats(self) -> EngineStats:
        return self._engine.stats()


def _inspect_text(
    model: SequenceModel, state: bytes | None, ids: Sequence[int], has_tokens: bool
) -> tuple[LayerReport, ...]:
    """With a shared copy of the model: the engine's thread runs the model itself at the same time.

    Nothing of an architecture whose layers route no tokens to memory slots.
    """
    if not isinstance(model, NsmModel):
        return ()
    start = None if state is None else model.state_spec.unpack(state)
    if start is not None:
        start = {name: value.to(model.embedding.weight.device) for name, value in start.items()}
    is_on_cpu = model.embedding.weight.device.type == "cpu"
    with one_thread() if is_on_cpu else contextlib.nullcontext():
        return summarise(inspect(shared_copy(model), ids, start), has_tokens=has_tokens)
