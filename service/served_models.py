"""The models of one server, by the names that clients use.

The first is there from start to end. Any other one is loaded when a request needs it. When the next one needs its room,
the least recently used goes, if nobody uses it. A model that cannot be loaded refuses its own requests alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import itertools
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Generic, Literal, Protocol, TypeVar

from nsm_core.errors import ModelUnavailable, NotFound, NsmError
from nsm_core.heap import trim_heap
from service.backends.base import InferenceBackend
from service.messages import quoted
from service.telemetry.metrics.models import ModelLoadMetrics

logger = logging.getLogger("nsm.models")

RETRY_S = 10.0  # after a failure; reading a bad file for each request would take time from the others
MIB = 2**20

Status = Literal["loaded", "loading", "unloaded", "failed"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OtherModel:
    """A model beside the first. `num_file_bytes`: of its files. `load` blocks, and raises NsmError or MemoryError."""

    name: str
    fingerprint: str
    num_file_bytes: int
    load: Callable[[], InferenceBackend]


class OneModel(Protocol):
    """What serves one model: `Services`."""

    @property
    def backend(self) -> InferenceBackend: ...

    @property
    def model_name(self) -> str: ...

    @property
    def num_running(self) -> int:
        """Turns of its sessions that run."""
        ...


ModelT = TypeVar("ModelT", bound=OneModel)


@dataclasses.dataclass(slots=True, eq=False)
class _Place(Generic[ModelT]):
    """Of a model beside the first. `num_users`: requests that have asked for it and are not over."""

    model: OtherModel
    num_bytes: int
    served: ModelT | None = None
    stack: contextlib.AsyncExitStack = dataclasses.field(default_factory=contextlib.AsyncExitStack)
    loading: asyncio.Task[None] | None = None
    num_users: int = 0
    last_use: int = 0
    failure: str | None = None
    failed_at: float = 0.0

    @property
    def status(self) -> Status:
        if self.served is not None:
            return "loaded"
        if self.loading is not None:
            return "loading"
        return "unloaded" if self.failure is None else "failed"

    @property
    def is_idle(self) -> bool:
        if self.served is None or self.num_users or self.served.num_running:
            return False
        stats = self.served.backend.stats()
        return stats.num_running + stats.num_waiting == 0


def _give_memory_back() -> None:
    """A server's collector seldom runs, and an engine is part of cycles."""
    gc.collect()
    trim_heap()


_held: ContextVar[list[_Place[OneModel]] | None] = ContextVar("nsm_held_models", default=None)


@contextlib.contextmanager
def holding_models() -> Iterator[None]:
    """Around one request: the models that it asks for inside stay loaded until its end."""
    places: list[_Place[OneModel]] = []
    token = _held.set(places)
    try:
        yield
    finally:
        _held.reset(token)
        for place in places:
            place.num_users -= 1


class ServedModels(Generic[ModelT]):
    """Of one application, on its event loop. `max_bytes`: of the files and states of all models beside the first."""

    def __init__(
        self,
        others: Sequence[OtherModel] = (),
        *,
        metrics: ModelLoadMetrics,
        max_bytes: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._places: dict[str, _Place[ModelT]] = {one.name: _Place(one, one.num_file_bytes) for one in others}
        self._max_bytes = max_bytes
        self._metrics = metrics
        self._clock = clock
        self._uses = itertools.count(1)
        self._one_at_a_time = asyncio.Lock()
        self._first: ModelT | None = None

    def open(
        self,
        first: ModelT,
        assemble: Callable[[OtherModel, InferenceBackend], ModelT],
        running: Callable[[ModelT], contextlib.AbstractAsyncContextManager[None]],
    ) -> None:
        """Once, before anything else. `assemble` makes of a loaded model what serves it; `running` starts and stops
        that.
        """
        self._first, self._assemble, self._running = first, assemble, running

    @property
    def first(self) -> ModelT:
        if self._first is None:
            raise RuntimeError("the models were not opened")
        return self._first

    @property
    def has_others(self) -> bool:
        return bool(self._places)

    @property
    def names(self) -> tuple[str, ...]:
        return (self.first.model_name, *self._places)

    @property
    def loaded(self) -> tuple[ModelT, ...]:
        return (self.first, *(place.served for place in self._places.values() if place.served is not None))

    def status_of(self, name: str) -> tuple[Status, str | None]:
        """With the reason of a failure."""
        place = self._places.get(name)
        return ("loaded", None) if place is None else (place.status, place.failure)

    def description_of(self, name: str) -> OtherModel | None:
        """None: it is the first."""
        return self._places[name].model if name in self._places else None

    def loaded_as(self, name: str) -> ModelT | None:
        """None: it is not loaded now."""
        return self._places[name].served if name in self._places else self.first

    def require_known(self, name: str) -> None:
        """Raises NotFound."""
        if name not in self.names:
            names = " and ".join(repr(known) for known in self.names)
            raise NotFound(
                f"the model {quoted(name)} does not exist; this server serves {names}",
                param="model",
                code="model_not_found",
            )

    def name_of(self, fingerprint: str) -> str | None:
        """None: no model with this fingerprint is served here."""
        if fingerprint == self.first.backend.model.fingerprint:
            return self.first.model_name
        return next((name for name, place in self._places.items() if place.model.fingerprint == fingerprint), None)

    async def get(self, name: str | None) -> ModelT:
        """What serves a model (None: the first), loaded first if need be. Raises NotFound or ModelUnavailable."""
        if name is None or name == self.first.model_name:
            return self.first
        self.require_known(name)
        place = self._places[name]
        while place.served is None:
            if place.loading is None:
                if place.failure is not None and self._clock() - place.failed_at < RETRY_S:
                    raise ModelUnavailable(place.failure)
                place.loading = asyncio.create_task(self._load(place))  # goes on if the request is left
            await asyncio.shield(place.loading)
        place.last_use = next(self._uses)
        held = _held.get()
        if held is not None:
            place.num_users += 1
            held.append(place)  # type: ignore[arg-type]
        return place.served

    async def of_fingerprint(self, fingerprint: str) -> ModelT:
        """That of a stored session or state; the first where none has this fingerprint. Raises as `get`."""
        return await self.get(self.name_of(fingerprint))

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """At the end all but the first are unloaded."""
        self._tell()
        try:
            yield
        finally:
            for place in self._places.values():
                if place.loading is not None:
                    await asyncio.wait((place.loading,))
                await self._unload(place)

    async def on_loaded(self, act: Callable[[ModelT], Awaitable[object]]) -> None:
        """`act` on each loaded model, all at once."""
        await asyncio.gather(*(act(served) for served in self.loaded))

    async def _load(self, place: _Place[ModelT]) -> None:
        started = self._clock()
        try:
            async with self._one_at_a_time:
                await self._make_room(place)
                logger.info("loading model %s", place.model.name)
                await self._start(place)
                await self._make_room(place)  # its states are known now
        except (NsmError, MemoryError, OSError) as error:
            await self._unload(place)
            self._failed(place, error)
            self._metrics.ended(place.model.name, "failed", self._clock() - started)
            raise ModelUnavailable(place.failure or "") from error
        else:
            place.failure = None
            self._metrics.ended(place.model.name, "loaded", self._clock() - started)
        finally:
            place.loading = None
            self._tell()

    def _failed(self, place: _Place[ModelT], error: NsmError | MemoryError | OSError) -> None:
        """Clients learn no paths; the log has them."""
        logger.error("model %s: %s", place.model.name, error.with_notes() if isinstance(error, NsmError) else error)
        known = str(error) if isinstance(error, ModelUnavailable) else "the server's log says why"
        place.failure = f"the model {place.model.name!r} cannot be loaded: {known}"
        # room may come at any time, a good file does not
        place.failed_at = -RETRY_S if isinstance(error, ModelUnavailable) else self._clock()

    async def _start(self, place: _Place[ModelT]) -> None:
        backend = await asyncio.to_thread(place.model.load)
        async with contextlib.AsyncExitStack() as stack:
            served = self._assemble(place.model, backend)
            await stack.enter_async_context(self._running(served))
            place.stack = stack.pop_all()
        place.num_bytes = place.model.num_file_bytes + backend.stats().max_slots * backend.model.state_bytes
        place.last_use, place.served = next(self._uses), served

    async def _make_room(self, wanted: _Place[ModelT]) -> None:
        """Raises ModelUnavailable while the others that are there are in use."""
        if self._max_bytes is None:
            return
        if wanted.num_bytes > self._max_bytes:
            raise ModelUnavailable(
                f"it takes {wanted.num_bytes // MIB} MiB, and models beside the first may take {self._max_bytes // MIB}"
            )
        while self._num_bytes(wanted) > self._max_bytes:
            idle = [place for place in self._places.values() if place is not wanted and place.is_idle]
            if not idle:
                raise ModelUnavailable("there is no room for it while the other models are in use")
            await self._unload(min(idle, key=lambda place: place.last_use))

    def _num_bytes(self, wanted: _Place[ModelT]) -> int:
        """With `wanted`, loaded or not."""
        return sum(place.num_bytes for place in self._places.values() if place is wanted or place.served is not None)

    async def _unload(self, place: _Place[ModelT]) -> None:
        """From now on a request for it loads it again."""
        if place.served is None:
            return
        place.served = None
        await place.stack.aclose()
        place.stack = contextlib.AsyncExitStack()
        await asyncio.to_thread(_give_memory_back)
        self._metrics.unloaded(place.model.name)
        logger.info("unloaded model %s", place.model.name)
        self._tell()

    def _tell(self) -> None:
        for name, place in self._places.items():
            self._metrics.is_loaded(name, place.served is not None)
