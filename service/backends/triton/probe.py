"""Health of a Triton server's worker, by its own answers and steps, not by Triton's."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Literal

from nsm_core.errors import DeadlineExceeded, EngineDead, Overloaded
from nsm_core.sampling.params import SamplingParams
from nsm_core.wire.call_tensors import encode_call
from nsm_core.wire.calls import DescribeCall, GenerateCall, StatusCall
from nsm_core.wire.description import WorkerStatus, decode_description, decode_status
from nsm_core.wire.tensors import Tensors
from service.backends.triton.channel import CallFailed, TritonChannel
from service.backends.triton.tls import TritonTls

Probe = Literal["startup", "readiness", "liveness"]

ASK_AGAIN_S = 0.05
STEP = GenerateCall(prompt_ids=(0,), sampling=SamplingParams(max_tokens=1, seed=0, ignore_eos=True))


async def ask_worker(kind: Probe, url: str, *, tls: TritonTls | None = None, timeout_s: float) -> str:
    """The observed state, in a few words. `timeout_s`: of each of three questions at most, to each instance.

    `liveness`: its engine's loop runs. `startup` and `readiness`: its model makes a step. Raises NsmError where it is
    not so with any instance.
    """
    channel = TritonChannel(url, tls=tls)
    try:
        described = decode_description(await channel.ask(encode_call(DescribeCall()), timeout_s=timeout_s))
        states = [await _ask(kind, channel, instance, timeout_s) for instance in described.instances or (None,)]
        return states[-1]
    except CallFailed as error:
        raise EngineDead(f"the worker refused: {error}") from error
    finally:
        await channel.close()


async def _ask(kind: Probe, channel: TritonChannel, instance: str | None, timeout_s: float) -> str:
    async def ask(call: StatusCall | GenerateCall) -> Tensors:
        return await channel.ask(encode_call(call), timeout_s=timeout_s, instance=instance)

    before = _status_of(await ask(StatusCall()))
    if kind == "liveness":
        return "the engine's loop runs"
    if await _makes_a_token(ask):
        return "the model made a token"
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:  # a full queue refuses at once, a step takes its time
        after = _status_of(await ask(StatusCall()))
        if after.engine.num_steps > before.engine.num_steps:
            return "busy: the model makes steps for others"  # who waits for its turn is not ill
        await asyncio.sleep(ASK_AGAIN_S)
    raise EngineDead(f"the model made no step within {timeout_s:g} s")


def _status_of(answer: Tensors) -> WorkerStatus:
    status = decode_status(answer)
    if not status.is_ready:
        raise EngineDead("its engine makes no steps")
    return status


async def _makes_a_token(ask: Callable[[GenerateCall], Awaitable[Tensors]]) -> bool:
    """Not where the queue is full, or long."""
    try:
        answer = await ask(STEP)
    except DeadlineExceeded:
        return False
    except CallFailed as error:
        if isinstance(error.failure.error, Overloaded):
            return False
        raise
    return len(answer.get("token_ids", ())) == 1
