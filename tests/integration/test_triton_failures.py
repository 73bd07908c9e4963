"""What becomes of requests when a Triton server, or its process that runs the model, ends; memory over many answers."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx
import pytest

from nsm_core.engine.request import FinishReason
from nsm_core.errors import EngineDead
from nsm_core.sampling.params import SamplingParams
from nsm_core.triton.supervisor import EXIT_KILLED
from nsm_core.wire.call_tensors import encode_call
from nsm_core.wire.calls import GenerateCall
from tests.support.counts import scaled
from tests.support.slow_steps import slow_steps
from tests.support.triton_servers import MAX_SLOTS, RunningTriton, TritonClient, eventually, running_triton, wait_until

pytestmark = pytest.mark.triton

ENDLESS = 131_072
STREAMS, TOKENS, WARM_UPS = MAX_SLOTS - 1, 120, 2
NUM_ANSWERS = scaled(5_000, 200_000)
GROWTH_BYTES = 8 * 2**20  # of a process, beyond what it had when warm


@pytest.fixture
def server(tmp_path: Path, tiny_model_dir: Path) -> Iterator[RunningTriton]:
    """One that a test may kill."""
    with running_triton(tmp_path, tiny_model_dir, drain_s="3") as server:
        yield server


def call(max_tokens: int, seed: int = 0) -> GenerateCall:
    sampling = SamplingParams(max_tokens=max_tokens, seed=seed, ignore_eos=True)
    return GenerateCall(prompt_ids=(0, 7, 9), sampling=sampling, stream=True, return_state=True, keep_state=True)


async def is_running(client: TritonClient, number: int) -> bool:
    return (await client.status()).engine.num_running == number


def is_alive(pid: int) -> bool:
    """A process that ended and was not waited for counts as dead."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def test_T2_a_killed_worker_takes_its_server_with_it(server: RunningTriton) -> None:
    """Clients see broken connections within a second, and nothing of the server stays in shared memory."""
    async with TritonClient(server) as client:
        with slow_steps():
            streams = [asyncio.create_task(client.call(call(ENDLESS, seed))) for seed in range(4)]
            await eventually(lambda: is_running(client, 4))
            assert server.shared_memory()
            os.kill(server.stub_pid, signal.SIGKILL)
        ended = await asyncio.wait_for(asyncio.gather(*streams, return_exceptions=True), timeout=60)
        assert [type(error) for error in ended] == [grpc.aio.AioRpcError] * 4
    assert server.process.wait(60) == EXIT_KILLED
    assert server.shared_memory() == {}


async def test_T1_T2_T7_a_server_without_its_supervisor_and_its_successor(server: RunningTriton) -> None:
    """Triton alone hides a dead worker, which is why a gateway asks for the engine's own status (or it aborts, if the
    worker had just asked about a cancel); what a killed server leaves in shared memory is freed by the next one; and
    that one lets its streams end when it stops, or ends them in good order after a while.
    """
    server.process.send_signal(signal.SIGSTOP)
    server_pid = server.server_pid
    async with TritonClient(server) as client, httpx.AsyncClient(base_url=server.http_url, timeout=60.0) as http:
        stream = asyncio.create_task(client.call(call(ENDLESS)))
        await eventually(lambda: is_running(client, 1))
        os.kill(server.stub_pid, signal.SIGKILL)
        with pytest.raises((EngineDead, grpc.aio.AioRpcError)) as caught:
            await client.status()
        if isinstance(caught.value, EngineDead):
            assert "not healthy" in str(caught.value)
            for path in ("/v2/health/ready", "/v2/models/nsm/ready"):
                assert (await http.get(path)).status_code == 200
            assert not stream.done()
        else:
            await asyncio.to_thread(wait_until, lambda: not is_alive(server_pid), "the server's abort")
        stream.cancel()
        await asyncio.gather(stream, return_exceptions=True)

    server.kill()
    wait_until(lambda: not is_alive(server_pid), "the end of the server")
    left = set(server.shared_memory())
    assert left
    server.start()
    assert not left & set(server.shared_memory())

    async with TritonClient(server) as client:
        with slow_steps():
            streams = [asyncio.create_task(client.call(call(tokens))) for tokens in (60, ENDLESS)]
            await eventually(lambda: is_running(client, 2))
            server.process.send_signal(signal.SIGTERM)
        ends = [(await stream).finished for stream in streams]
    assert [end.reason for end in ends] == [FinishReason.LENGTH, FinishReason.ABORT]
    assert await asyncio.to_thread(server.process.wait, 60) == 0
    assert server.shared_memory() == {}


def resident_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


async def answer_many(client: TritonClient) -> int:
    """Streams with a state out, beside one whose client leaves; how many answers came."""
    left = client.stream(encode_call(call(ENDLESS)))
    await anext(left)
    streams = await asyncio.gather(*(client.call(call(TOKENS, seed)) for seed in range(STREAMS)))
    left.cancel()
    return sum(len(answers.tensors) for answers in streams)


@pytest.mark.timeout(3600)
async def test_T1_memory_stays_flat_over_many_answers(triton: RunningTriton) -> None:
    pids = (triton.server_pid, triton.stub_pid)
    async with TritonClient(triton) as client:
        for _ in range(WARM_UPS):
            await answer_many(client)
        before, regions = [resident_bytes(pid) for pid in pids], triton.shared_memory()
        num_answers = 0
        while num_answers < NUM_ANSWERS:
            num_answers += await answer_many(client)
    grown = [resident_bytes(pid) - memory for pid, memory in zip(pids, before, strict=True)]
    assert max(grown) < GROWTH_BYTES, f"bytes that server and worker grew by: {grown}"
    assert triton.shared_memory() == regions
