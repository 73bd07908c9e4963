"""The worker's side of a link: the requests of one gateway, whose events are the answers to one long call."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
import time
from collections.abc import Callable

from nsm_core.engine.generation_handle import GenerationHandle
from nsm_core.engine.request import Event, Finished, FinishReason, TokenEvent
from nsm_core.engine.token_rows import NUMBER_BITS, Ints
from nsm_core.errors import InvalidRequest, NsmError
from nsm_core.triton.call_stats import CallClock, CallStats
from nsm_core.triton.forwarding import Pacing, failure_of
from nsm_core.triton.responder import Responder
from nsm_core.wire.calls import GenerateCall
from nsm_core.wire.errors import Failure, StateMissing
from nsm_core.wire.link import WINDOW, LinkStep, Opened, Start, Taken, ToGateway, ToWorker, encode_to_gateway
from nsm_core.wire.step_collector import StepCollector
from nsm_core.wire.tensors import MESSAGES, bytes_array

logger = logging.getLogger("nsm.triton")

FULL_S = 0.5  # between two answers to a gateway that is behind, or whose word was lost
MAX_EARLY = 1_024  # calls that came before one that was made before them


@dataclasses.dataclass(frozen=True, slots=True)
class _Request:
    call: GenerateCall
    handle: GenerationHandle
    clock: CallClock


class Link:
    """One gateway. Belongs to the worker's loop.

    `index`: of a listener of the engine; no other has it. `open_request` gives a call, with a tag, to the engine, and
    raises NsmError or StateMissing. `keep` keeps a state and gives its id.
    """

    def __init__(
        self,
        responder: Responder,
        index: int,
        *,
        open_request: Callable[[GenerateCall, int], GenerationHandle],
        keep: Callable[[bytes], str],
        stats: CallStats,
        pacing: Pacing,
    ) -> None:
        self.responder = responder
        self._tag = index << NUMBER_BITS
        self._open_request, self._keep, self._stats, self._pacing = open_request, keep, stats, pacing
        self._requests: dict[int, _Request] = {}
        self._ending: dict[int, _Request] = {}  # whose last event waits
        self._collector = StepCollector()
        self._retained: list[tuple[int, str]] = []
        self._missing: list[int] = []
        self._num_calls, self._early = 0, dict[int, list[ToWorker]]()
        self._num_sent = self._num_taken = 0
        self._sent_at = 0.0
        self._sending: asyncio.Handle | None = None
        self._is_sending_soon = False
        self._is_draining = False
        self._is_over = asyncio.Event()

    async def run(self) -> None:
        """Until the gateway leaves, or until `drain` and the end of the last request."""
        with self._pacing.stream():
            try:
                self._send(Opened())
                await self._is_over.wait()
            finally:
                for request in self._requests.values():
                    request.handle.cancel()
                self._requests.clear()
                if self._sending is not None:
                    self._sending.cancel()

    def leave(self) -> None:
        """The gateway has left."""
        self._is_over.set()

    def drain(self) -> None:
        """No request will come any more."""
        self._is_draining = True
        self._end_if_drained()

    def post(self, number: int, messages: list[ToWorker]) -> None:
        """The `number`th call with messages; those before it are waited for. Raises InvalidRequest."""
        if not self._num_calls <= number < self._num_calls + MAX_EARLY or number in self._early:
            raise InvalidRequest(f"number must be the next of its link, got {number}", param="number")
        self._early[number] = messages
        while (ready := self._early.pop(self._num_calls, None)) is not None:
            self._num_calls += 1
            for message in ready:
                self._take(message)

    def add_tokens(self, numbers: Ints, ids: Ints) -> None:
        """Plain tokens of a step; both [n]."""
        self._collector.add_tokens(numbers, ids)
        self._make_due(may_wait=True)

    def _take(self, message: ToWorker) -> None:
        if isinstance(message, Start):
            self._start(message.number, message.call)
        elif isinstance(message, Taken):
            self._num_taken = min(message.num_answers, self._num_sent)
            if self._sending is not None:
                self._make_due(may_wait=False)
        elif (request := self._requests.get(message.number)) is not None:
            request.handle.cancel()

    @property
    def _is_full(self) -> bool:
        """Whether the gateway is behind."""
        return self._num_sent - self._num_taken >= WINDOW

    def _start(self, number: int, call: GenerateCall) -> None:
        if number in self._requests or not 0 <= number < 2**NUMBER_BITS:
            raise InvalidRequest(f"the number of a request must be new, got {number}", param=MESSAGES)
        clock = CallClock(self._stats)
        try:
            handle = self._open_request(call, self._tag | number)
        except StateMissing as error:
            self._missing.append(number)
            clock.failed(Failure(error=error))
        except NsmError as error:
            self._collector.add(number, Finished(reason=FinishReason.ERROR, error=error), has_free_text=True)
            clock.failed(Failure(error=error))
        else:
            self._requests[number] = _Request(call, handle, clock)
            handle.listen(functools.partial(self._add, number))
            return
        self._make_due(may_wait=False)

    def _add(self, number: int, event: Event) -> None:
        request = self._requests.get(number)
        if request is None:  # the gateway has left
            return
        if isinstance(event, Finished):
            self._ending[number] = self._requests.pop(number)
            if event.end_state is not None and request.call.keep_state:
                self._retained.append((number, self._keep(event.end_state.state)))
        self._collector.add(number, event, has_free_text=request.handle.request.has_free_text)
        self._make_due(may_wait=isinstance(event, TokenEvent) and request.clock.has_tokens)

    def _make_due(self, *, may_wait: bool) -> None:
        """A message when the loop has delivered all of a step; tokens that are not a stream's first may wait longer,
        and all while the gateway is behind.
        """
        if self._is_sending_soon:
            return
        loop, hold_s = asyncio.get_running_loop(), self._pacing.hold_s() if may_wait else 0.0
        wait_s = self._sent_at + (FULL_S if self._is_full else hold_s) - time.monotonic()
        if wait_s <= 0.0:
            if self._sending is not None:
                self._sending.cancel()
            self._is_sending_soon, self._sending = True, loop.call_soon(self._send_step)
        elif self._sending is None:
            self._sending = loop.call_later(wait_s, self._send_step)

    def _send_step(self) -> None:
        self._sending, self._is_sending_soon = None, False
        counts = self._collector.count_tokens()
        step = LinkStep(self._collector.take(0), self._retained, self._missing)
        self._retained, self._missing = [], []
        began = time.monotonic()
        self._send(step)
        self._sent_at = time.monotonic()
        self._pacing.sent(self._sent_at - began)
        for number, num_tokens in counts.items():
            request = self._requests.get(number) or self._ending.get(number)
            if request is not None:
                request.clock.sent_tokens(num_tokens, self._sent_at)
        for number, end in step.step.ends:
            request = self._ending.pop(number, None)
            if request is None:
                continue
            if end.error is None:
                request.clock.ended(end.reason, self._sent_at)
            else:
                request.clock.failed(failure_of(end, end.error))
        self._end_if_drained()

    def _end_if_drained(self) -> None:
        if self._is_draining and not self._requests and not self._ending and self._sending is None:
            self._is_over.set()

    def _send(self, message: ToGateway) -> None:
        self._num_sent += 1
        try:
            self.responder.send({MESSAGES: bytes_array(encode_to_gateway(message))}, is_last=False)
        except Exception:  # whatever Triton's own code raises: there is nobody left to tell
            logger.exception("an answer to a gateway failed")
            self._is_over.set()
