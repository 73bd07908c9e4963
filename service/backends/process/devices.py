"""The model on several devices of this machine: an engine's process for each, one backend for all."""

from __future__ import annotations

import asyncio
import functools
from collections import OrderedDict
from collections.abc import Sequence

from nsm_core.engine.generation_handle import GenerationHandle
from nsm_core.engine.request import GenerationRequest, NamedState
from nsm_core.errors import ConfigError, EngineDead, InvalidRequest, NsmError
from nsm_core.grammars.grammar import Grammar
from nsm_core.inspection.report import LayerReport
from nsm_core.model_info import ModelInfo
from nsm_core.state.report import Detail, StateReport
from nsm_core.stats import EngineStats, add_stats
from nsm_core.tokenizer import Tokenizer
from service.backends.base import DeviceStats
from service.backends.process.backend import ProcessBackend

FIND_S = 1.0  # a turn waits no longer to learn which engine holds its state
FETCH_S = 5.0  # nor for its megabytes: to read the log takes about as long
MAX_PROMPTS = 1_024  # shared prompts whose engines are known


class DevicesBackend:
    """An InferenceBackend. `engines`: each with the name of its device.

    A request goes to the engine that holds the state which it starts from, others to the one with the least to do. All
    engines compute alike, so any of them continues any session.
    """

    def __init__(self, engines: Sequence[tuple[str, ProcessBackend]]) -> None:
        self._devices = tuple(device for device, _ in engines)
        self._engines = tuple(engine for _, engine in engines)
        self._prompts: OrderedDict[str, ProcessBackend] = OrderedDict()  # by name of a shared prompt
        self._num_picks = 0
        self._picked_at = dict.fromkeys(self._engines, 0)
        self._seen = [EngineStats() for _ in engines]  # as each engine's process told last
        self._ended = EngineStats()  # of processes that ended

    @property
    def model(self) -> ModelInfo:
        return self._engines[0].model

    @property
    def tokenizer(self) -> Tokenizer:
        return self._engines[0].tokenizer

    @property
    def max_requests(self) -> int:
        return sum(engine.max_requests for engine in self._engines)

    async def start(self) -> None:
        starts = await asyncio.gather(*(engine.start() for engine in self._engines), return_exceptions=True)
        errors = [error for error in starts if isinstance(error, BaseException)]
        if not errors:
            numerics = [engine.model.numerics for engine in self._engines]
            if len(set(numerics)) > 1:
                pairs = zip(self._devices, numerics, strict=True)
                classes = ", ".join(f"{device} as {name}" for device, name in pairs)
                errors.append(ConfigError(f"the devices of one server must compute alike: {classes}"))
        if errors:
            await self.stop()
            raise errors[0]

    async def stop(self) -> None:
        await asyncio.gather(*(engine.stop() for engine in self._engines))

    def require_room(self) -> None:
        self._with_room()

    def submit(self, request: GenerationRequest) -> GenerationHandle:
        if any(engine.has_request(request.request_id) for engine in self._engines):
            raise InvalidRequest(f"request id {request.request_id} is in use", param="request_id")
        if request.resume is not None and request.resume.held is not None:
            return self._owner(request.resume.held).submit(request)
        choice = self._with_room()
        engine = self._least_busy(choice)
        if request.shared_prompt is not None:
            engine = self._engine_of_prompt(request.shared_prompt.name, engine, choice)
        self._num_picks += 1
        self._picked_at[engine] = self._num_picks
        return engine.submit(request, move_on=functools.partial(self._move_on, frozenset((engine,))))

    def _move_on(self, tried: frozenset[ProcessBackend], handle: GenerationHandle) -> bool:
        """Gives a request that the engines `tried` refused to another one; each gets it once."""
        if handle.has_ended or handle.is_cancelled:
            return False
        choice = [engine for engine in self._engines if engine not in tried and engine.has_room()]
        if not choice:
            return False
        engine = self._least_busy(choice)
        engine.take_over(handle, move_on=functools.partial(self._move_on, tried | {engine}))
        return True

    def _least_busy(self, choice: Sequence[ProcessBackend]) -> ProcessBackend:
        return min(choice, key=lambda engine: (engine.load, self._picked_at[engine]))

    async def check_grammar(self, grammar: Grammar) -> None:
        await self._any().check_grammar(grammar)

    @property
    def holds_states(self) -> bool:
        return all(engine.holds_states for engine in self._engines)

    async def fetch_state(self, number: int) -> bytes | None:
        """None also of an engine that is not up, or says nothing in FETCH_S."""
        owner = self._owner(number)
        if not owner.is_ready():
            return None
        try:
            return await asyncio.wait_for(owner.fetch_state(number), FETCH_S)
        except (TimeoutError, EngineDead):
            return None

    async def find_state(self, name: str) -> NamedState | None:
        """Of any engine that is up; one that says nothing in FIND_S has none."""
        asked = [asyncio.create_task(engine.find_state(name)) for engine in self._engines if engine.is_ready()]
        if asked:
            done, late = await asyncio.wait(asked, timeout=FIND_S)
            for task in late:
                task.cancel()
            for task in done:
                found = None if task.exception() is not None else task.result()
                if found is not None:
                    return found
        return None

    def name_state(self, name: str, number: int, about: bytes) -> None:
        """Another engine's state of that name goes."""
        owner = self._owner(number)
        for engine in self._engines:
            if engine is owner:
                engine.name_state(name, number, about)
            else:
                engine.forget_state(name)

    def forget_state(self, name: str) -> None:
        for engine in self._engines:
            engine.forget_state(name)

    def drop_state(self, number: int) -> None:
        self._owner(number).drop_state(number)

    async def inspect_state(
        self, state: bytes | None, *, detail: Detail = Detail.LAYER, layer: int | None = None
    ) -> StateReport:
        return await self._any().inspect_state(state, detail=detail, layer=layer)

    async def inspect_text(
        self, state: bytes | None, ids: Sequence[int], *, has_tokens: bool = False
    ) -> tuple[LayerReport, ...]:
        return await self._any().inspect_text(state, ids, has_tokens=has_tokens)

    def is_ready(self) -> bool:
        """Whether some engine takes requests."""
        return any(engine.is_ready() for engine in self._engines)

    def stats(self) -> EngineStats:
        """Of all engines together. Counters of a process that ended stay; the heartbeat is the oldest one."""
        for index, engine in enumerate(self._engines):
            now, before = engine.stats(), self._seen[index]
            if now.num_steps < before.num_steps:
                self._ended = add_stats(self._ended, before.counters())
            self._seen[index] = now
        total = self._ended
        for stats in self._seen:
            total = add_stats(total, stats)
        return total

    def device_stats(self) -> list[DeviceStats]:
        return [
            DeviceStats(engine=number, device=device, is_up=engine.is_ready(), num_requests=engine.load)
            for number, (device, engine) in enumerate(zip(self._devices, self._engines, strict=True))
        ]

    def _with_room(self) -> list[ProcessBackend]:
        """Raises what an engine that is up would raise, or EngineDead."""
        choice, errors = [], []
        for engine in self._engines:
            try:
                engine.require_room()
            except NsmError as error:
                errors.append(error)
            else:
                choice.append(engine)
        if not choice:
            raise next((error for error in errors if not isinstance(error, EngineDead)), errors[0])
        return choice

    def _owner(self, held: int) -> ProcessBackend:
        return self._engines[held % len(self._engines)]

    def _engine_of_prompt(self, name: str, default: ProcessBackend, choice: Sequence[ProcessBackend]) -> ProcessBackend:
        known = self._prompts.get(name)
        engine = known if known is not None and known in choice else default
        self._prompts[name] = engine
        self._prompts.move_to_end(name)
        if len(self._prompts) > MAX_PROMPTS:
            self._prompts.popitem(last=False)
        return engine

    def _any(self) -> ProcessBackend:
        """One that is up, if any is: else it raises EngineDead itself."""
        return min(self._engines, key=lambda engine: (not engine.is_ready(), engine.load))
