"""From a request in the engine to the client that waits for it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence

from nsm_core.engine.async_engine import GenerationHandle
from nsm_core.engine.request import Finished, TokenEvent
from nsm_core.triton.responder import Responder
from nsm_core.wire.errors import Failure
from nsm_core.wire.events import EventEncoder

# All streams are sent to by one thread, and each answer costs the server and the client as much again.
HOLD_TO_SENDING = 9.0
MAX_HOLD_S = 0.05  # nobody who reads along sees it
MEMORY = 16  # answers, over which the cost of one is averaged


class Pacing:
    """How long tokens of a stream wait for each other after an answer with tokens, the first of them included.

    So long that sending to all streams takes a tenth of the thread's time at most. Few streams, or long steps: the next
    token comes later than that, and is sent as it comes.
    """

    def __init__(self) -> None:
        self._num_streams = 0
        self._send_s = 0.0

    @contextlib.contextmanager
    def stream(self) -> Iterator[None]:
        """Around the life of one."""
        self._num_streams += 1
        try:
            yield
        finally:
            self._num_streams -= 1

    def sent(self, seconds: float) -> None:
        """What one answer took."""
        self._send_s += (seconds - self._send_s) / MEMORY

    def hold_s(self) -> float:
        return min(MAX_HOLD_S, HOLD_TO_SENDING * self._send_s * self._num_streams)


async def forward_stream(handle: GenerationHandle, encoder: EventEncoder, responder: Responder, pacing: Pacing) -> None:
    """An answer for each token, or for several where the answers are behind or `pacing` has them wait."""
    with pacing.stream():
        await _forward_batches(handle, encoder, responder, pacing)


async def _forward_batches(
    handle: GenerationHandle, encoder: EventEncoder, responder: Responder, pacing: Pacing
) -> None:
    async for batch in handle.batches(hold_s=pacing.hold_s):
        tokens: list[TokenEvent] = []
        for event in batch:
            if isinstance(event, TokenEvent):
                tokens.append(event)
                continue
            _send_tokens(tokens, encoder, responder, pacing)
            tokens = []
            if isinstance(event, Finished) and event.error is not None:
                responder.fail(failure_of(event, event.error))
            else:
                responder.send(encoder.encode(event), is_last=isinstance(event, Finished))
        _send_tokens(tokens, encoder, responder, pacing)


async def forward_whole(handle: GenerationHandle, encoder: EventEncoder, responder: Responder) -> None:
    """One answer."""
    events = [event async for event in handle.events()]
    last = events[-1]
    if isinstance(last, Finished) and last.error is not None:
        responder.fail(failure_of(last, last.error))
    else:
        responder.send(encoder.encode_whole(events), is_last=True)


def _send_tokens(tokens: Sequence[TokenEvent], encoder: EventEncoder, responder: Responder, pacing: Pacing) -> None:
    if tokens:
        began = time.monotonic()
        responder.send(encoder.encode_tokens(tokens), is_last=False)
        pacing.sent(time.monotonic() - began)


def failure_of(finished: Finished, error: Exception) -> Failure:
    """An error with the work done before it."""
    return Failure(
        error=error,
        prompt_tokens=finished.prompt_tokens,
        cached_tokens=finished.cached_tokens,
        completion_tokens=finished.completion_tokens,
    )
