"""One request on Triton servers: from the one that breaks it goes on with the next, and nobody notices."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
import time
from collections.abc import AsyncIterator, Callable

from nsm_core.engine.event_queue import EventQueue
from nsm_core.engine.request import Event, Finished, FinishReason, GenerationRequest, PromptScored, PromptState
from nsm_core.errors import DeadlineExceeded, EngineDead, NsmError, Overloaded
from nsm_core.wire.call_tensors import encode_call
from nsm_core.wire.calls import GenerateCall, call_of
from nsm_core.wire.errors import Failure, StateMissing
from nsm_core.wire.events import EventDecoder
from nsm_core.wire.tensors import Tensors
from service.backends.triton_channel import CallFailed, TritonStream
from service.backends.triton_upstream import Upstream
from service.backends.triton_upstreams import Upstreams

logger = logging.getLogger("nsm.triton")

MAX_LOSSES = 3  # servers that one request may lose: it could be what kills them
PLACE_S = 10.0  # to wait for a server when none is up
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
        self._events = EventQueue()
        self._ids: list[int] = []  # sampled here
        self._is_scored = False
        self._num_states = 0  # of those within the prompt
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

    def cancel(self) -> None:
        """Finished(reason=abort) comes at once, and the worker is told. Idempotent, never blocks."""
        self._task.cancel()

    async def stop(self) -> None:
        """Cancels it, and returns when its server has been told."""
        self.cancel()
        await asyncio.wait({self._task})

    def _end(self, task: asyncio.Task[Finished]) -> None:
        if task.cancelled():
            finished = self._finished(FinishReason.ABORT)
        elif (error := task.exception()) is None:
            finished = task.result()
        else:
            if not isinstance(error, NsmError):
                logger.error("request %s failed", self.request.request_id, exc_info=error)
                error = EngineDead(f"the gateway failed: {type(error).__name__}")
            finished = self._finished(FinishReason.ERROR, error=error)
        self._on_end(self, finished)
        self._events.put(finished)

    async def _run(self) -> Finished:
        """Raises NsmError for what the last event shall tell as an error."""
        while True:
            call = await self._call()
            upstream = await self._place(None if call.resume is None else call.resume.state_id)
            try:
                return await self._attempt(upstream, call)
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

    async def _call(self) -> GenerateCall:
        """What is still to be done. What the client has got is not asked for again."""
        request = dataclasses.replace(
            self.request,
            sampled_ids=(*self.request.sampled_ids, *self._ids),
            prompt_logprobs=None if self._is_scored else self.request.prompt_logprobs,
            keep_states_at=self.request.keep_states_at[self._num_states :],
        )
        now = time.monotonic()
        if request.resume is None or len(request.resume.state) <= SMALL_STATE_BYTES:
            return call_of(request, now=now)
        return await asyncio.to_thread(call_of, request, now=now)  # Python's lock is free while it digests

    async def _place(self, state_id: str | None) -> Upstream:
        """Raises EngineDead when no server comes up in time, or DeadlineExceeded."""
        left_s = self._time_left()
        try:
            async with asyncio.timeout(PLACE_S if left_s is None else min(PLACE_S, left_s)):
                while (upstream := self._upstreams.pick(state_id, avoid=self._full)) is None:
                    if self._full:
                        await asyncio.sleep(FULL_PAUSE_S)
                        self._full.clear()
                    else:
                        await self._upstreams.change()
        except TimeoutError:
            if left_s is not None and left_s <= PLACE_S:
                raise DeadlineExceeded("the deadline passed before a Triton server was ready") from None
            raise EngineDead("no Triton server is ready") from None
        return upstream

    async def _attempt(self, upstream: Upstream, call: GenerateCall) -> Finished:
        """On one server. Raises EngineDead where another shall go on, or CallFailed."""
        left_s = self._time_left()
        with upstream.stream(timeout_s=None if left_s is None else left_s + DEADLINE_GRACE_S) as stream:
            self.is_placed = True
            tensors = await self._first_answer(upstream, stream, call)
            decoder = EventDecoder(call)
            while True:
                for event in decoder.decode(tensors):
                    if isinstance(event, Finished):
                        if event.reason is FinishReason.ABORT:  # nobody here asked for it
                            raise EngineDead("the worker is stopping")
                        if decoder.kept_state_id is not None:
                            self._upstreams.remember(decoder.kept_state_id, upstream)
                        return event
                    self._give(event)
                tensors = await stream.receive()

    async def _first_answer(self, upstream: Upstream, stream: TritonStream, call: GenerateCall) -> Tensors:
        """The state's bytes go along where the server is not thought to have them."""
        state_id = None if call.resume is None else call.resume.state_id
        if state_id is None:
            await stream.send(encode_call(call))
            return await stream.receive()
        if self._upstreams.has_state(upstream, state_id):
            await stream.send(encode_call(call, with_state=False))
            try:
                answer = await stream.receive()
            except CallFailed as error:
                if not isinstance(error.failure.error, StateMissing):
                    raise
            else:
                self._upstreams.count_state(is_hit=True)
                return answer
        self._upstreams.count_state(is_hit=False)
        await stream.send(encode_call(call))
        answer = await stream.receive()
        self._upstreams.remember(state_id, upstream)
        return answer

    def _give(self, event: Event) -> None:
        if isinstance(event, PromptScored):
            self._is_scored = True
        elif isinstance(event, PromptState):
            self._num_states += 1
        elif not isinstance(event, Finished):
            self._ids.append(event.token_id)
        self._events.put(event)

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
        return self._finished(FinishReason.ERROR, error=error)

    def _finished(self, reason: FinishReason, *, error: NsmError | None = None) -> Finished:
        """An end that no worker told."""
        cached = 0 if self.request.resume is None else self.request.resume.position
        return Finished(
            reason=reason,
            prompt_tokens=cached + len(self.request.prompt_ids),
            cached_tokens=cached,
            completion_tokens=len(self.request.sampled_ids) + len(self._ids),
            error=error,
        )
