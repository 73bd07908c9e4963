"""From a request in the engine to the client that waits for it."""

from __future__ import annotations

from collections.abc import Sequence

from nsm_core.engine.async_engine import GenerationHandle
from nsm_core.engine.request import Finished, TokenEvent
from nsm_core.triton.responder import Responder
from nsm_core.wire.errors import Failure
from nsm_core.wire.events import EventEncoder


async def forward_stream(handle: GenerationHandle, encoder: EventEncoder, responder: Responder) -> None:
    """An answer for each token, or for several where the answers are behind."""
    async for batch in handle.batches():
        tokens: list[TokenEvent] = []
        for event in batch:
            if isinstance(event, TokenEvent):
                tokens.append(event)
                continue
            _send_tokens(tokens, encoder, responder)
            tokens = []
            if isinstance(event, Finished) and event.error is not None:
                responder.fail(_failure_of(event, event.error))
            else:
                responder.send(encoder.encode(event), is_last=isinstance(event, Finished))
        _send_tokens(tokens, encoder, responder)


async def forward_whole(handle: GenerationHandle, encoder: EventEncoder, responder: Responder) -> None:
    """One answer."""
    events = [event async for event in handle.events()]
    last = events[-1]
    if isinstance(last, Finished) and last.error is not None:
        responder.fail(_failure_of(last, last.error))
    else:
        responder.send(encoder.encode_whole(events), is_last=True)


def _send_tokens(tokens: Sequence[TokenEvent], encoder: EventEncoder, responder: Responder) -> None:
    if tokens:
        responder.send(encoder.encode_tokens(tokens), is_last=False)


def _failure_of(finished: Finished, error: Exception) -> Failure:
    """An error with what was done before it."""
    return Failure(
        error=error,
        prompt_tokens=finished.prompt_tokens,
        cached_tokens=finished.cached_tokens,
        completion_tokens=finished.completion_tokens,
    )
