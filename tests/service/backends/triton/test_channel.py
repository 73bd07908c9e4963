"""Streams to Triton servers, to their end in any moment."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator

import pytest

from nsm_core.errors import DeadlineExceeded, EngineDead
from nsm_core.wire.call_tensors import encode_call
from nsm_core.wire.calls import StatusCall
from service.backends.triton.channel import TritonChannel, TritonStream

LATE_S = 60.0  # a test that waits so long has failed


@pytest.fixture
async def channel() -> AsyncIterator[TritonChannel]:
    """To a server that takes connections and says nothing, so no call ever begins."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        _, port = listening.getsockname()
        channel = TritonChannel(f"127.0.0.1:{port}")
        yield channel
        await channel.close()


async def send(stream: TritonStream) -> None:
    async with asyncio.timeout(LATE_S):
        await stream.send(encode_call(StatusCall()))


async def test_call_whose_time_is_over_before_it_began_ends(channel: TritonChannel) -> None:
    with pytest.raises((DeadlineExceeded, EngineDead)):
        await send(channel.open(timeout_s=0.1))


async def test_call_that_is_left_before_it_began_ends(channel: TritonChannel) -> None:
    sending = asyncio.create_task(send(channel.open(timeout_s=None)))
    await asyncio.sleep(0)
    sending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sending
