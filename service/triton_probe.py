"""Whether the worker of a Triton server is well: its own word and its own steps, not Triton's."""

from __future__ import annotations

from typing import Literal

from nsm_core.errors import DeadlineExceeded, EngineDead, Overloaded
from nsm_core.sampling.params import SamplingParams
from nsm_core.wire.call_tensors import encode_call
from nsm_core.wire.calls import GenerateCall, StatusCall
from nsm_core.wire.description import WorkerStatus, decode_status
from nsm_core.wire.tensors import Tensors
from service.backends.triton_channel import CallFailed, TritonChannel
from service.backends.triton_tls import TritonTls

Probe = Literal["startup", "readiness", "liveness"]

STEP = GenerateCall(prompt_ids=(0,), sampling=SamplingParams(max_tokens=1, seed=0, ignore_eos=True))


async def ask_worker(kind: Probe, url: str, *, tls: TritonTls | None = None, timeout_s: float) -> str:
    """What was seen, in a few words. `timeout_s`: of each of three questions at most.

    `liveness`: its engine's loop runs. `startup` and `readiness`: its model makes a step. Raises NsmError where it is
    not so.
    """
    channel = TritonChannel(url, tls=tls)
    try:
        before = await _status(channel, timeout_s)
        if kind == "liveness":
            return "the engine's loop runs"
        if await _makes_a_token(channel, timeout_s):
            return "the model made a token"
        after = await _status(channel, timeout_s)
        if after.engine.num_steps > before.engine.num_steps:
            return "busy: the model makes steps for others"  # who waits for its turn is not ill
        raise EngineDead(f"the model made no step within {timeout_s:g} s")
    except CallFailed as error:
        raise EngineDead(f"the worker refused: {error}") from error
    finally:
        await channel.close()


async def _status(channel: TritonChannel, timeout_s: float) -> WorkerStatus:
    status = decode_status(await _ask(channel, StatusCall(), timeout_s))
    if not status.is_ready:
        raise EngineDead("its engine makes no steps")
    return status


async def _makes_a_token(channel: TritonChannel, timeout_s: float) -> bool:
    """Not where the queue is full, or long."""
    try:
        answer = await _ask(channel, STEP, timeout_s)
    except DeadlineExceeded:
        return False
    except CallFailed as error:
        if isinstance(error.failure.error, Overloaded):
            return False
        raise
    return len(answer.get("token_ids", ())) == 1


async def _ask(channel: TritonChannel, call: StatusCall | GenerateCall, timeout_s: float) -> Tensors:
    stream = channel.open(timeout_s=timeout_s)
    try:
        await stream.send(encode_call(call))
        return await stream.receive()
    finally:
        stream.cancel()
