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
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
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
class _Entry(Generic[ModelT]):
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


_held: ContextVar[list[_Entry[OneModel]] | None] = ContextVar("nsm_held_models", default=None)


class holding_models:  # noqa: N801  # used like a function
    """Around one request: the models that it asks for inside stay loaded until its end."""

    def __enter__(self) -> None:
        self._entries: list[_Entry[OneModel]] = []
        self._token = _held.set(self._entries)

    def __exit__(self, *error: object) -> None:
        _held.reset(self._token)
        for entry in self._entries:
            entry.num_users -= 1


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
        self._entries: dict[str, _Entry[ModelT]] = {one.name: _Entry(one, one.num_file_bytes) for one in others}
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
        return bool(self._entries)

    @property
    def names(self) -> tuple[str, ...]:
        return (self.first.model_name, *self._entries)

    @property
    def loaded(self) -> tuple[ModelT, ...]:
        return (self.first, *(entry.served for entry in self._entries.values() if entry.served is not None))

    def status_of(self, name: str) -> tuple[Status, str | None]:
        """With the reason of a failure."""
        entry = self._entries.get(name)
        return ("loaded", None) if entry is None else (entry.status, entry.failure)

    def description_of(self, name: str) -> OtherModel | None:
        """None: it is the first."""
        return self._entries[name].model if name in self._entries else None

    def loaded_as(self, name: str) -> ModelT | None:
        """None: it is not loaded now."""
        return self._entries[name].served if name in self._entries else self.first

    def require_known(self, name: str) -> None:
        """Raises NotFound."""
        if name not in self.names:
            names = " and ".join(repr(known) for known in self.names)
            raise NotFound(
                f"the model {quoted(name)} does not exist; this server serves {names}",
                param="model",
                code="model_not_found",
            )

    def fingerprint_of(self, name: str | None) -> str | None:
        """Of a model (None: the first); None: no model with this name is served here."""
        if name is None or name == self.first.model_name:
            return self.first.backend.model.fingerprint
        return self._entries[name].model.fingerprint if name in self._entries else None

    def name_of(self, fingerprint: str) -> str | None:
        """None: no model with this fingerprint is served here."""
        if fingerprint == self.first.backend.model.fingerprint:
            return self.first.model_name
        return next((name for name, entry in self._entries.items() if entry.model.fingerprint == fingerprint), None)

    async def get(self, name: str | None) -> ModelT:
        """What serves a model (None: the first), loaded first if need be. Raises NotFound or ModelUnavailable."""
        if name is None or name == self.first.model_name:
            return self.first
        self.require_known(name)
        entry = self._entries[name]
        while entry.served is None:
            if entry.loading is None:
                if entry.failure is not None and self._clock() - entry.failed_at < RETRY_S:
                    raise ModelUnavailable(entry.failure)
                entry.loading = asyncio.create_task(self._load(entry))  # goes on if the request is left
            await asyncio.shield(entry.loading)
        entry.last_use = next(self._uses)
        held = _held.get()
        if held is not None:
            entry.num_users += 1
            held.append(entry)  # type: ignore[arg-type]
        return entry.served

    async def of_fingerprint(self, fingerprint: str) -> ModelT:
        """That of a stored session or state; the first where none has this fingerprint. Raises as `get`."""
        return await self.get(self.name_of(fingerprint))

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """At the end all but the first are unloaded."""
        self._report()
        try:
            yield
        finally:
            for entry in self._entries.values():
                if entry.loading is not None:
                    await asyncio.wait((entry.loading,))
                await self._unload(entry)

    async def on_loaded(self, act: Callable[[ModelT], Awaitable[object]]) -> None:
        """`act` on each loaded model, all at once."""
        await asyncio.gather(*(act(served) for served in self.loaded))

    async def _load(self, entry: _Entry[ModelT]) -> None:
        started = self._clock()
        try:
            async with self._one_at_a_time:
                await self._make_room(entry)
                logger.info("loading model %s", entry.model.name)
                await self._start(entry)
                await self._make_room(entry)  # its states are known now
        except (NsmError, MemoryError, OSError) as error:
            await self._unload(entry)
            self._failed(entry, error)
            self._metrics.ended(entry.model.name, "failed", self._clock() - started)
            raise ModelUnavailable(entry.failure or "") from error
        else:
            entry.failure = None
            self._metrics.ended(entry.model.name, "loaded", self._clock() - started)
        finally:
            entry.loading = None
            self._report()

    def _failed(self, entry: _Entry[ModelT], error: NsmError | MemoryError | OSError) -> None:
        """Clients learn no paths; the log has them."""
        logger.error("model %s: %s", entry.model.name, error.with_notes() if isinstance(error, NsmError) else error)
        known = str(error) if isinstance(error, ModelUnavailable) else "the server's log says why"
        entry.failure = f"the model {entry.model.name!r} cannot be loaded: {known}"
        # room may come at any time, a good file does not
        entry.failed_at = -RETRY_S if isinstance(error, ModelUnavailable) else self._clock()

    async def _start(self, entry: _Entry[ModelT]) -> None:
        backend = await asyncio.to_thread(entry.model.load)
        async with contextlib.AsyncExitStack() as stack:
            served = self._assemble(entry.model, backend)
            await stack.enter_async_context(self._running(served))
            entry.stack = stack.pop_all()
        entry.num_bytes = entry.model.num_file_bytes + backend.stats().max_slots * backend.model.state_bytes
        entry.last_use, entry.served = next(self._uses), served

    async def _make_room(self, wanted: _Entry[ModelT]) -> None:
        """Raises ModelUnavailable while the others that are there are in use."""
        if self._max_bytes is None:
            return
        if wanted.num_bytes > self._max_bytes:
            raise ModelUnavailable(
                f"it takes {wanted.num_bytes // MIB} MiB, and models beside the first may take {self._max_bytes // MIB}"
            )
        while self._num_bytes(wanted) > self._max_bytes:
            idle = [entry for entry in self._entries.values() if entry is not wanted and entry.is_idle]
            if not idle:
                raise ModelUnavailable("there is no room for it while the other models are in use")
            await self._unload(min(idle, key=lambda entry: entry.last_use))

    def _num_bytes(self, wanted: _Entry[ModelT]) -> int:
        """With `wanted`, loaded or not."""
        return sum(entry.num_bytes for entry in self._entries.values() if entry is wanted or entry.served is not None)

    async def _unload(self, entry: _Entry[ModelT]) -> None:
        """From now on a request for it loads it again."""
        if entry.served is None:
            return
        entry.served = None
        await entry.stack.aclose()
        entry.stack = contextlib.AsyncExitStack()
        await asyncio.to_thread(_give_memory_back)
        self._metrics.unloaded(entry.model.name)
        logger.info("unloaded model %s", entry.model.name)
        self._report()

    def _report(self) -> None:
        for name, entry in self._entries.items():
            self._metrics.is_loaded(name, entry.served is not None)
