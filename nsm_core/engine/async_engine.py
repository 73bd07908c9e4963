"""One thread that steps the engine, and its asyncio face.

The thread owns the `Engine`; the event loop owns the table of handles. Commands go in through one inbox, and the events
of a step come out in one call to the loop. No lock is held while a step runs.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence

from nsm_core.engine.engine import Engine, Events
from nsm_core.engine.generation_handle import GenerationHandle as GenerationHandle
from nsm_core.engine.request import Finished, FinishReason, GenerationRequest
from nsm_core.engine.stream_pace import StreamPace
from nsm_core.engine.token_rows import NUMBER_BITS, Ints, TokenBatch
from nsm_core.errors import EngineDead, InvalidRequest, NsmError, Overloaded
from nsm_core.grammars.compiler import CompilePool
from nsm_core.grammars.grammar import Grammar
from nsm_core.grammars.matcher import TokenMatcher
from nsm_core.inspection.routing import MAX_ROUTED_REQUESTS
from nsm_core.stats import EngineStats

logger = logging.getLogger("nsm.engine")

# (index of a listener, numbers [n], ids [n]), int64
TakeTokens = Callable[[int, Ints, Ints], None]
TakeTokensNow = Callable[[int, Ints, Ints], bool]

# An idle thread wakes this often, so that its heartbeat stays fresh.
IDLE_TURN_S = 1.0
STATS_S = 0.05  # between two copies of the counters, while steps give plain tokens alone
# A thread without a heartbeat for this long hangs.
HEARTBEAT_LIMIT_S = 5.0


@dataclasses.dataclass(frozen=True, slots=True)
class _Submit:
    """`at`: a `time.monotonic()` reading."""

    request: GenerationRequest
    at: float
    matcher: TokenMatcher | None = None
    tag: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class _Cancel:
    request_id: str


class _Inbox:
    """Commands for the engine's thread, in order. `on_change`: called after each."""

    def __init__(self, on_change: Callable[[], None]) -> None:
        self._on_change = on_change
        self._commands: list[_Submit | _Cancel] = []
        self._is_closed = False
        self._changed = threading.Condition()

    def put(self, command: _Submit | _Cancel) -> None:
        with self._changed:
            self._commands.append(command)
            self._changed.notify()
        self._on_change()

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._on_change()

    def take(self, *, wait_s: float) -> tuple[list[_Submit | _Cancel], bool]:
        """All commands, and whether the inbox was closed. Waits up to `wait_s` if there is neither."""
        with self._changed:
            if wait_s and not self._commands and not self._is_closed:
                self._changed.wait(wait_s)
            commands, self._commands = self._commands, []
            return commands, self._is_closed


class AsyncEngine:
    """Runs an engine in a thread. All methods but `GenerationHandle.cancel` belong to the loop that called `start`.

    `after_step` is called on that thread after each step, and must not block. `pace`: of diverted tokens.
    """

    def __init__(
        self, engine: Engine, *, after_step: Callable[[], None] = lambda: None, pace: StreamPace | None = None
    ) -> None:
        self._pace = StreamPace() if pace is None else pace
        self._engine = engine
        self._after_step = after_step
        self._limit = engine.config.max_requests
        self._queue_limit = engine.config.queue_limit
        self._inbox = _Inbox(engine.interrupt.set)
        self._compiling = CompilePool(engine.grammars)
        self._handles: dict[str, GenerationHandle] = {}
        self._token_listener: TakeTokens | None = None
        self._take_now: TakeTokensNow | None = None
        self._num_posted = 0  # calls of the loop by the thread, which alone changes it
        self._num_delivered = 0  # those that have ended; the loop alone changes it
        self._tags = itertools.count()
        self._by_tag: dict[int, GenerationHandle] = {}  # those whose text is made here
        self._tag_of: dict[str, int] = {}  # of the same, by their ids
        self._thread = threading.Thread(target=self._run, name="nsm-engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._has_ended = asyncio.Event()
        self._end: EngineDead | None = EngineDead("the engine was not started")
        # Written by the thread as whole values, read by any thread
        self._heartbeat = time.monotonic()
        self._stats, self._stats_at = engine.stats(), self._heartbeat

    async def start(self) -> None:
        """Starts the thread; once."""
        self._loop = asyncio.get_running_loop()
        self._end = None
        self._heartbeat = time.monotonic()
        self._thread.start()

    async def stop(self) -> None:
        """Every request ends with `abort` after the current step; then the thread ends. Idempotent.

        It takes as long as that step, and may be cancelled.
        """
        self._end = self._end or EngineDead("the engine is stopping")
        self._inbox.close()
        self._compiling.close()
        if self._loop is not None:
            # not a join in an executor: the interpreter would wait for that thread at its end
            await self._has_ended.wait()
            self._thread.join()

    def require_room(self) -> None:
        """Raises EngineDead or Overloaded if `submit` would now, for any request."""
        if self._end is not None:
            raise EngineDead(str(self._end))
        age_s = self._heartbeat_age_s()
        if age_s >= HEARTBEAT_LIMIT_S:
            raise EngineDead(f"the engine does not answer: it has been in one step for {age_s:.0f} s")
        if len(self._handles) >= self._limit:
            raise Overloaded(f"the queue is full: {self._queue_limit} requests may wait")

    def listen_tokens(self, listener: TakeTokens, *, now: TakeTokensNow | None = None) -> None:
        """`listener` gets plain tokens, on the loop, instead of handles: of requests whose tag has the index of a
        listener above NUMBER_BITS, by the numbers below. Before `start`.

        `now` is asked first, on the engine's thread, for steps of plain tokens alone, if the loop has delivered all
        before: the loop need not wake for them. It must not block; False: the listener shall have them.
        """
        self._token_listener, self._take_now = listener, now

    def submit(self, request: GenerationRequest, *, tag: int | None = None) -> GenerationHandle:
        """Queues a request. Raises EngineDead, Overloaded, InvalidRequest, StateMismatch or SnapshotCorrupt.

        `tag`: see Engine.add.
        """
        if request.request_id in self._handles:
            raise InvalidRequest(f"request id {request.request_id} is in use", param="request_id")
        self.require_room()
        self._engine.check(request)
        self._check_num_watched(request)
        text = None
        if tag is None and self._engine.may_overlap and request.has_free_text:
            tag, text = next(self._tags), self._engine.text_of(request)
        handle = GenerationHandle(request, self._cancel, self._pace, text)
        if self._loop is not None:
            handle.start_timer(self._loop)
        self._handles[request.request_id] = handle
        if text is not None and tag is not None:
            self._by_tag[tag], self._tag_of[request.request_id] = handle, tag
        if request.sampling.grammar is None:
            self._inbox.put(_Submit(request, time.monotonic(), tag=tag))
        else:
            self._submit_compiled(handle, request.sampling.grammar, tag)
        return handle

    async def check_grammar(self, grammar: Grammar) -> None:
        """Returns when the grammar stands. Raises InvalidRequest or Overloaded."""
        await self._compiling.check(grammar)

    def _submit_compiled(self, handle: GenerationHandle, grammar: Grammar, tag: int | None) -> None:
        """Neither this loop nor the engine's thread waits for the grammar, and nothing is sampled before it stands."""
        loop, arrival = asyncio.get_running_loop(), time.monotonic()

        def enqueue(compiled: concurrent.futures.Future[TokenMatcher]) -> None:
            error = EngineDead("the engine is stopping") if compiled.cancelled() else compiled.exception()
            if handle.has_ended or handle.is_cancelled or error is not None:
                if error is not None and not isinstance(error, NsmError):
                    logger.error("a grammar was not compiled", exc_info=error)
                    error = EngineDead(f"the grammar was not compiled: {type(error).__name__}")
                handle.fail(error)
                self._forget(handle.request.request_id)
            else:
                self._inbox.put(_Submit(handle.request, arrival, compiled.result(), tag))

        def call_loop(compiled: concurrent.futures.Future[TokenMatcher]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop was closed before: no reader is left
                loop.call_soon_threadsafe(enqueue, compiled)

        try:
            self._compiling.submit(grammar).add_done_callback(call_loop)
        except NsmError:
            self._forget(handle.request.request_id)
            raise

    def _forget(self, request_id: str) -> None:
        """The request's last event was delivered, or it was never queued."""
        self._handles.pop(request_id, None)
        self._by_tag.pop(self._tag_of.pop(request_id, -1), None)

    def _check_num_watched(self, request: GenerationRequest) -> None:
        """Bounds the memory for captured routing; each such request also slows the others down."""
        if not request.include_routing:
            return
        num_watched = sum(handle.request.include_routing for handle in self._handles.values())
        if num_watched >= MAX_ROUTED_REQUESTS:
            message = f"at most {MAX_ROUTED_REQUESTS} requests with include_routing may run at a time"
            raise Overloaded(message, param="include_routing")

    def _cancel(self, request_id: str) -> None:
        self._inbox.put(_Cancel(request_id))

    def is_alive(self) -> bool:
        """Whether the thread runs, and no request was refused for good."""
        return self._end is None

    def is_ready(self) -> bool:
        """Whether requests are taken and the thread's heartbeat is fresh."""
        return self._end is None and self._heartbeat_age_s() < HEARTBEAT_LIMIT_S

    def _heartbeat_age_s(self) -> float:
        return time.monotonic() - self._heartbeat

    def stats(self) -> EngineStats:
        """The counters as they were after a step at most STATS_S ago, and the age of the heartbeat now."""
        return dataclasses.replace(self._stats, heartbeat_age_s=self._heartbeat_age_s())

    def _run(self) -> None:
        """The body of the thread. However it ends, every request gets its last event."""
        end = EngineDead("the engine was stopped")
        try:
            while self._turn():
                pass
        except Exception as error:
            logger.exception("the engine's thread failed")
            end = EngineDead(f"the engine failed: {type(error).__name__}")
        self._call_loop_end(end)

    def _turn(self) -> bool:
        """Takes commands, runs one step, posts its events. Once the inbox is closed, ends every request: False."""
        self._engine.interrupt.clear()
        wait_s = 0.0 if self._engine.has_work else self._engine.rest_due_s(IDLE_TURN_S)
        commands, is_closed = self._inbox.take(wait_s=wait_s)
        self._heartbeat = time.monotonic()
        events: Events = []
        for command in commands:
            if isinstance(command, _Cancel):
                self._engine.cancel(command.request_id)
            else:
                events += self._add(command)
        events += self._engine.abort_all() if is_closed else self._engine.step()
        self._update_stats(is_due=bool(events) or not self._engine.has_work)
        self._post(events, self._engine.take_tokens() if self._engine.may_overlap else [])
        self._after_step()
        self._engine.rest()
        return not is_closed

    def _update_stats(self, *, is_due: bool) -> None:
        """A copy of all counters takes a tenth of a short step: steps of plain tokens alone make one now and then."""
        if is_due or self._heartbeat - self._stats_at >= STATS_S:
            self._stats, self._stats_at = self._engine.stats(), self._heartbeat

    def _add(self, command: _Submit) -> Events:
        try:
            self._engine.add(  # `submit` has checked it
                command.request, arrival=command.at, matcher=command.matcher, tag=command.tag, is_checked=True
            )
        except NsmError as error:
            return self._refuse(command, error)
        except Exception as error:  # of one request: the others must not end with it
            logger.exception("a request could not be queued")
            return self._refuse(command, EngineDead(f"the request could not be queued: {type(error).__name__}"))
        return []

    @staticmethod
    def _refuse(command: _Submit, error: NsmError) -> Events:
        return [(command.request.request_id, Finished(reason=FinishReason.ERROR, error=error))]

    def _post(self, events: Events, tokens: Sequence[TokenBatch]) -> None:
        if self._loop is None:
            return
        if tokens and not events and self._take_now is not None and self._num_posted == self._num_delivered:
            tokens = _left(tokens, self._take_now)
        if events or tokens:
            self._num_posted += 1
            self._loop.call_soon_threadsafe(self._deliver, events, tokens)

    def _call_loop_end(self, end: EngineDead) -> None:
        if self._loop is None:
            return
        try:
            self._loop.call_soon_threadsafe(self._close, end)
        except RuntimeError:
            # The loop was closed before: no reader is left
            logger.warning("the engine's event loop ended before the engine")

    def _deliver(self, events: Events, tokens: Sequence[TokenBatch]) -> None:
        """On the loop."""
        for batch in tokens:
            if self._token_listener is None:  # then no tag has an index
                self._deliver_ids(batch.tags, batch.ids)
                continue
            for index, numbers, ids in batch.by_listener():
                if index:
                    self._token_listener(index, numbers, ids)
                else:
                    self._deliver_ids(numbers, ids)
        for request_id, event in events:
            self._handles[request_id].deliver(event)
            if isinstance(event, Finished):
                self._forget(request_id)
        self._pace.step_ended()
        self._num_delivered += 1

    def _deliver_ids(self, tags: Ints, ids: Ints) -> None:
        """Plain tokens whose text is made here. Both [n]."""
        handles = self._by_tag
        for tag, token_id in zip(tags.tolist(), ids.tolist(), strict=True):
            handles[tag].deliver_id(token_id)

    def _close(self, end: EngineDead) -> None:
        """On the loop, after the last events: ends the requests that the engine did not end."""
        self._end = end
        for handle in self._handles.values():
            handle.fail(end)
        for request_id in list(self._handles):
            self._forget(request_id)
        self._has_ended.set()


def _left(tokens: Sequence[TokenBatch], take_now: TakeTokensNow) -> list[TokenBatch]:
    """Those that are not taken now, and those without a listener."""
    left: list[TokenBatch] = []
    refused = {0}
    for batch in tokens:
        for index, numbers, ids in batch.by_listener():
            if index in refused or not take_now(index, numbers, ids):
                refused.add(index)
                left.append(TokenBatch(numbers | index << NUMBER_BITS, ids))
    return left
