from __future__ import annotations

import contextlib

from nsm_core.engine.event_queue import EventQueue
from nsm_core.engine.request import Finished, FinishReason, TokenEvent
from nsm_core.sampling.params import SamplingParams
from nsm_core.triton.forwarding import HOLD_TO_SENDING, MAX_HOLD_S, Pacing, forward_stream
from nsm_core.wire.calls import GenerateCall
from nsm_core.wire.events import EventEncoder
from tests.nsm_core.triton.fake_triton import FakeResponder

SEND_S = 0.0002


class Handle:
    """Stands for a GenerationHandle."""

    def __init__(self) -> None:
        self.queue = EventQueue()
        self.batches = self.queue.batches


def steady_streams(num_streams: int) -> tuple[Pacing, contextlib.ExitStack]:
    """After many answers of SEND_S; the streams end with the stack."""
    pacing, stack = Pacing(), contextlib.ExitStack()
    for _ in range(num_streams):
        stack.enter_context(pacing.stream())
    for _ in range(200):
        pacing.sent(SEND_S)
    return pacing, stack


def test_tokens_wait_for_so_long_that_sending_takes_a_tenth_of_the_time() -> None:
    for num_streams in (1, 2, 16):
        pacing, stack = steady_streams(num_streams)
        with stack:
            sending_s = num_streams * SEND_S
            assert abs(sending_s / (sending_s + pacing.hold_s()) - 1 / (1 + HOLD_TO_SENDING)) < 1e-3
        assert pacing.hold_s() == 0


def test_holding_has_a_bound() -> None:
    pacing, stack = steady_streams(1000)
    with stack:
        assert pacing.hold_s() == MAX_HOLD_S


async def test_a_stream_that_is_held_has_all_its_tokens() -> None:
    handle, responder, (pacing, stack) = Handle(), FakeResponder(), steady_streams(1000)
    tokens = [TokenEvent(index=index, token_id=index, text=f"{index} ") for index in range(1, 6)]
    for event in (*tokens, Finished(reason=FinishReason.LENGTH)):
        handle.queue.put(event)
    call = GenerateCall(text="x", sampling=SamplingParams(), stream=True)
    encoder = EventEncoder(call, fingerprint="f", num_prompt=1)
    with stack:
        await forward_stream(handle, encoder, responder, pacing)  # type: ignore[arg-type]
    assert responder.ids == [1, 2, 3, 4, 5]
    texts = [answer["text_output"][0].decode() for answer in responder.answers]
    assert "".join(texts) == "1 2 3 4 5 "
    assert responder.num_last == 1
