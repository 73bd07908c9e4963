"""What a worker's probes find, on a stand-in for the server that is ill on demand."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from nsm_core.errors import DeadlineExceeded, EngineDead, NumericalError
from nsm_core.sampling.params import SamplingParams
from nsm_core.tokenizer import Tokenizer
from nsm_core.wire.call_tensors import encode_call
from nsm_core.wire.calls import GenerateCall
from service.backends.triton.channel import TritonChannel
from service.backends.triton.probe import Probe, ask_worker
from tests.support.triton_stand_in import MAX_SLOTS, QUEUE_LIMIT, StandIn, random_loaded, stand_ins

ALL: tuple[Probe, ...] = ("startup", "readiness", "liveness")
ENDLESS = SamplingParams(max_tokens=131_072, seed=0, ignore_eos=True)


@pytest.fixture
async def server(tiny_tokenizer: Tokenizer) -> AsyncIterator[StandIn]:
    server = StandIn(random_loaded(tiny_tokenizer))
    async with stand_ins(server):
        yield server


async def ask(kind: Probe, server: StandIn, *, timeout_s: float = 30.0) -> str:
    return await ask_worker(kind, server.url, timeout_s=timeout_s)


async def test_a_well_worker_makes_a_token_and_a_liveness_probe_asks_for_none(server: StandIn) -> None:
    assert await ask("liveness", server) == "the engine's loop runs"
    assert server.options == []
    for number, kind in enumerate(("startup", "readiness"), 1):
        assert await ask(kind, server) == "the model made a token"
        assert [options["max_tokens"] for options in server.options] == [1] * number


async def test_T2_a_worker_whose_model_makes_no_step_is_alive_but_not_ready(server: StandIn) -> None:
    server.is_mute = True
    with pytest.raises(EngineDead, match=r"the model made no step within 1\.5 s"):
        await ask("readiness", server, timeout_s=1.5)
    assert await ask("liveness", server) == "the engine's loop runs"


async def test_T2_a_hung_worker_is_neither_ready_nor_alive(server: StandIn) -> None:
    server.is_hung = True
    for kind in ALL:
        with pytest.raises(DeadlineExceeded):
            await ask(kind, server, timeout_s=0.5)


async def test_a_model_that_fails_is_not_ready_and_the_reason_is_told(server: StandIn) -> None:
    server.fail_with = NumericalError("logits are not finite")
    with pytest.raises(EngineDead, match="the worker refused: logits are not finite"):
        await ask("readiness", server)


@pytest.mark.parametrize("num_others", [MAX_SLOTS, MAX_SLOTS + QUEUE_LIMIT], ids=["no-slot", "full-queue"])
async def test_a_busy_worker_is_ready(server: StandIn, num_others: int) -> None:
    """Who has no slot for the probe's token makes steps for others."""
    channel = TritonChannel(server.url)
    streams = [channel.open(timeout_s=None) for _ in range(num_others)]
    for stream in streams:
        await stream.send(encode_call(GenerateCall(prompt_ids=(0,), sampling=ENDLESS, stream=True)))
    answers = [asyncio.create_task(stream.receive()) for stream in streams]  # whichever of them came first
    await asyncio.wait(answers, return_when=asyncio.FIRST_COMPLETED)
    assert await ask("readiness", server, timeout_s=2.0) == "busy: the model makes steps for others"
    for stream in streams:
        stream.cancel()
    await asyncio.gather(*answers, return_exceptions=True)
    await channel.close()


async def test_no_server_is_not_well(tiny_tokenizer: Tokenizer) -> None:
    for kind in ALL:
        with pytest.raises(EngineDead, match="the connection to the Triton server broke"):
            await ask(kind, StandIn(random_loaded(tiny_tokenizer)))
