"""One request on Triton servers: after a failure it continues on the next one, and the client sees no difference."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import math
import time
from collections.abc import AsyncIterator, Callable

from nsm_core.engine.event_queue import EventQueue, TakeTokens
from nsm_core.engine.request import Event, Finished, FinishReason, GenerationRequest, TokenEvent
from nsm_core.engine.token_text import TokenText
from nsm_core.errors import DeadlineExceeded, EngineDead, NsmError, Overloaded
from nsm_core.wire.calls import GenerateCall, call_of
from nsm_core.wire.errors import Failure, StateMissing
from service.backends.triton.channel import CallFailed
from service.backends.triton.progress import Progress
from service.backends.triton.upstream import Upstream
from service.backends.triton.upstreams import Upstreams

logger = logging.getLogger("nsm.triton")

MAX_LOSSES = 3  # servers that one request may lose: it could be what kills them
SERVER_WAIT_S = 10.0  # to wait for a server when none is up
# A worker needs a moment to see that somebody left, so its queue may be full when the gateway's count says it is not.
FULL_S, FULL_PAUSE_S = 1.0, 0.05
SMALL_STATE_BYTES = 2**18  # digested in less time than a thread takes to start
DEADLINE_GRACE_S = 1.0  # the worker's own clock comes first: its answer tells more


class TritonGeneration:
    """A Generation. `on_end` is called once, right before the last event is given out."""

    def __init__(
        self, request: GenerationRequest, upstreams: Upstreams, *, on_end: Callable[[TritonGeneration, Finished], None]
    ) -> None:
        self.request = request
        self.is_placed = False  # a server has it, and counts it
        self.num_losses = 0
        self._upstreams = upstreams
        self._on_end = on_end
        text = TokenText(upstreams.served[1], request) if request.has_free_text else None
        self._events = EventQueue(upstreams.pace, text)
        self._progress = Progress(request, fingerprint=upstreams.served[0].model.fingerprint)
        self._full: set[Upstream] = set()
        self._full_since: float | None = None
        self._task = asyncio.create_task(self._run())
        self._task.add_done_callback(self._end)

    def events(self) -> AsyncIterator[Event]:
        """Each event once, in order; for one consumer."""
        return self._events.events()

    def batches(self) -> AsyncIterator[list[Event]]:
        """The same events, together all that are there when the consumer comes for more."""
        return self._events.batches()

    def divert(self, take: TakeTokens) -> None:
        """From now on tokens that come while the consumer waits go to `take`; see EventQueue."""
        self._events.divert(take)

    def cancel(self) -> None:
        """Finished(reason=abort) comes at once, and the worker gets a cancellation. Idempotent, never blocks."""
        self._task.cancel()

    async def stop(self) -> None:
        """Cancels it, and returns when its server has been told."""
        self.cancel()
        await asyncio.wait({self._task})

    def _end(self, task: asyncio.Task[Finished]) -> None:
        if task.cancelled():
            finished = self._progress.finished(FinishReason.ABORT)
        elif (error := task.exception()) is None:
            finished = task.result()
        else:
            if not isinstance(error, NsmError):
                logger.error("request %s failed", self.request.request_id, exc_info=error)
                error = EngineDead(f"the gateway failed: {type(error).__name__}")
            finished = self._progress.finished(FinishReason.ERROR, error=error)
        self._on_end(self, finished)
        self._events.put(finished)

    async def _run(self) -> Finished:
        """Raises NsmError for what the last event shall tell as an error."""
        while True:
            request = self._progress.next_request(self._upstreams.max_prompt_tokens)
            call = await _call_of(request)
            upstream = await self._choose_server(call)
            try:
                finished = await self._attempt(upstream, request, call)
                if finished is not None:
                    return finished
            except EngineDead as error:
                upstream.suspect()
                self.num_losses += 1
                logger.warning("request %s lost %s: %s", self.request.request_id, upstream.url, error)
                if self.num_losses > MAX_LOSSES:
                    raise
            except CallFailed as error:
                if not isinstance(error.failure.error, Overloaded) or self._has_waited():
                    return self._failed(error.failure)
                self._full.add(upstream)
            finally:
                self.is_placed = False

    async def _choose_server(self, call: GenerateCall) -> Upstream:
        """Raises EngineDead when no server comes up in time, or DeadlineExceeded."""
        state_id = None if call.resume is None else call.resume.state_id
        prompt = None if call.shared_prompt is None else call.shared_prompt.name
        left_s = self._time_left()
        try:
            async with asyncio.timeout(SERVER_WAIT_S if left_s is None else min(SERVER_WAIT_S, left_s)):
                while (upstream := self._upstreams.pick(state_id, prompt=prompt, avoid=self._full)) is None:
                    if self._full:
                        await asyncio.sleep(FULL_PAUSE_S)
                        self._full.clear()
                    else:
                        await self._upstreams.change()
        except TimeoutError:
            if left_s is not None and left_s <= SERVER_WAIT_S:
                raise DeadlineExceeded("the deadline passed before a Triton server was ready") from None
            raise EngineDead("no Triton server is ready") from None
        return upstream

    async def _attempt(self, upstream: Upstream, request: GenerationRequest, call: GenerateCall) -> Finished | None:
        """`request` on one server, as `call`. The end, or None when it was a piece of the prompt. Raises EngineDead
        where another server shall go on, CallFailed, or DeadlineExceeded.
        """
        left_s = self._time_left()
        try:
            async with asyncio.timeout(None if left_s is None else left_s + DEADLINE_GRACE_S):
                reported = self._progress.take(request, await self._ask(upstream, request, call))
        except TimeoutError:
            raise DeadlineExceeded("the Triton server did not answer in time") from None
        return reported if isinstance(reported, Finished) else None

    async def _ask(self, upstream: Upstream, request: GenerationRequest, call: GenerateCall) -> Finished:
        """The state's bytes go along where the server is not thought to have them."""
        state_id = None if call.resume is None else call.resume.state_id
        if state_id is not None and self._upstreams.has_state(upstream, state_id):
            with contextlib.suppress(StateMissing):
                bare = dataclasses.replace(call, state=None)
                return await self._ask_once(upstream, request, bare, lambda: self._count_state(is_hit=True))
        if state_id is None:
            return await self._ask_once(upstream, request, call, lambda: None)
        self._count_state(is_hit=False)
        return await self._ask_once(upstream, request, call, lambda: self._upstreams.remember(state_id, upstream))

    async def _ask_once(
        self, upstream: Upstream, request: GenerationRequest, call: GenerateCall, begun: Callable[[], None]
    ) -> Finished:
        """`begun`: called when the server has taken the request. Raises StateMissing too."""
        attempt = _Attempt(request, self._progress, self._events, begun)
        with upstream.request(call, attempt):
            self.is_placed = True
            finished = await attempt.ended
        if attempt.retained_state_id is not None:
            self._upstreams.remember(attempt.retained_state_id, upstream)
        return finished

    def _count_state(self, *, is_hit: bool) -> None:
        if not self._progress.has_pieces:  # a state of the turn before
            self._upstreams.count_state(is_hit=is_hit)

    def _has_waited(self) -> bool:
        """Whether the servers were full for long enough to say so."""
        now = time.monotonic()
        self._full_since = self._full_since or now
        return now - self._full_since > FULL_S

    def _time_left(self) -> float | None:
        """Seconds; None without a deadline."""
        deadline = self.request.deadline
        return None if deadline is None or deadline == math.inf else max(0.0, deadline - time.monotonic())

    def _failed(self, failure: Failure) -> Finished:
        error = failure.error
        if not isinstance(error, NsmError):
            error = EngineDead(str(error))
        return self._progress.finished(FinishReason.ERROR, error=error)


class _Attempt:
    """A request on one server: a Receiver that hands on what the client shall get. `ended`: the end that the server
    told; raises EngineDead where another server shall go on, CallFailed or StateMissing.
    """

    def __init__(
        self, request: GenerationRequest, progress: Progress, events: EventQueue, begun: Callable[[], None]
    ) -> None:
        self.ended: asyncio.Future[Finished] = asyncio.get_running_loop().create_future()
        self.retained_state_id: str | None = None
        self._request, self._progress, self._events = request, progress, events
        self._begun: Callable[[], None] | None = begun
        self._num_tokens = len(request.sampled_ids)

    def take(self, event: Event) -> None:
        if isinstance(event, Finished):
            self._take_end(event)
            return
        self._note_begun()
        if isinstance(event, TokenEvent):
            self._num_tokens = event.index
        reported = self._progress.take(self._request, event)
        if reported is not None:
            self._events.put(reported)

    def take_id(self, token_id: int) -> None:
        self._num_tokens += 1
        if self._begun is not None:
            self._note_begun()
        if self._progress.take_id(self._request, token_id):
            self._events.put_id(token_id)

    def take_shown(self, token_id: int, text: str) -> None:
        self.take(TokenEvent(index=self._num_tokens + 1, token_id=token_id, text=text))

    def note_retained(self, state_id: str) -> None:
        self.retained_state_id = state_id

    def lack_state(self) -> None:
        self._fail(StateMissing("the worker has let the state go"))

    def lose(self, error: EngineDead) -> None:
        self._fail(error)

    def _take_end(self, end: Finished) -> None:
        if end.reason is FinishReason.ABORT:  # nobody here asked for it
            self._fail(EngineDead("the worker is stopping"))
        elif isinstance(end.error, EngineDead):
            self._fail(end.error)
        elif end.error is not None:
            self._fail(CallFailed(Failure(error=end.error)))
        elif not self.ended.done():
            self._note_begun()
            self.ended.set_result(end)

    def _note_begun(self) -> None:
        if self._begun is not None:
            self._begun()
            self._begun = None

    def _fail(self, error: Exception) -> None:
        if not self.ended.done():
            self.ended.set_exception(error)


async def _call_of(request: GenerationRequest) -> GenerateCall:
    now = time.monotonic()
    if request.resume is None or len(request.resume.state) <= SMALL_STATE_BYTES:
        return call_of(request, now=now)
    return await asyncio.to_thread(call_of, request, now=now)  # Python's lock is free while it digests
