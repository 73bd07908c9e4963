"""One request on Triton servers: after a failure it continues on the next one, and the client sees no difference."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Callable

from nsm_core.engine.event_queue import EventQueue
from nsm_core.engine.request import Event, Finished, FinishReason, GenerationRequest
from nsm_core.errors import DeadlineExceeded, EngineDead, NsmError, Overloaded
from nsm_core.wire.call_tensors import encode_call
from nsm_core.wire.calls import GenerateCall, call_of
from nsm_core.wire.errors import Failure, StateMissing
from nsm_core.wire.events import EventDecoder
from nsm_core.wire.tensors import Tensors
from service.backends.triton.channel import CallFailed, TritonStream
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
        self._events = EventQueue()
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
        where another server shall go on, or CallFailed.
        """
        left_s = self._time_left()
        with upstream.stream(timeout_s=None if left_s is None else left_s + DEADLINE_GRACE_S) as stream:
            self.is_placed = True
            tensors = await self._first_answer(upstream, stream, call)
            decoder = EventDecoder(call)
            while True:
                for event in decoder.decode(tensors):
                    if isinstance(event, Finished) and event.reason is FinishReason.ABORT:  # nobody here asked for it
                        raise EngineDead("the worker is stopping")
                    reported = self._progress.take(request, event)
                    if isinstance(event, Finished):
                        if decoder.cached_state_id is not None:
                            self._upstreams.remember(decoder.cached_state_id, upstream)
                        return reported if isinstance(reported, Finished) else None
                    if reported is not None:
                        self._events.put(reported)
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
                self._count_state(is_hit=True)
                return answer
        self._count_state(is_hit=False)
        await stream.send(encode_call(call))
        answer = await stream.receive()
        self._upstreams.remember(state_id, upstream)
        return answer

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


async def _call_of(request: GenerationRequest) -> GenerateCall:
    now = time.monotonic()
    if request.resume is None or len(request.resume.state) <= SMALL_STATE_BYTES:
        return call_of(request, now=now)
    return await asyncio.to_thread(call_of, request, now=now)  # Python's lock is free while it digests
