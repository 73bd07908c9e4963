"""A real Triton server with several instances of the model, as with several GPUs."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from nsm_core.engine.request import Finished, Resume
from nsm_core.errors import InvalidRequest
from nsm_core.wire.call_tensors import encode_call
from nsm_core.wire.calls import StatusCall
from service.backends.triton.backend import TritonBackend
from service.backends.triton.channel import CallFailed, TritonChannel
from service.backends.triton.dev_server import InstanceGroup
from service.backends.triton.probe import ask_worker
from tests.nsm_core.engine.harness import Outcome, make_request, random_ids
from tests.support.triton_servers import MAX_SLOTS, QUEUE_LIMIT, RunningTriton, eventually, running_triton

pytestmark = pytest.mark.triton

NUM_INSTANCES = 2


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> Iterator[RunningTriton]:
    directory = tmp_path_factory.mktemp("instances")
    with running_triton(directory, tiny_model_dir, instances=InstanceGroup(NUM_INSTANCES)) as server:
        yield server


@pytest.fixture
def server(servers: RunningTriton) -> RunningTriton:
    """It runs: tests stop it."""
    if not servers.is_running:
        servers.start()
    return servers


async def test_T5_sessions_stay_with_their_instance_and_a_stop_breaks_no_stream(server: RunningTriton) -> None:
    backend = TritonBackend([server.grpc_url], wait_s=120)
    await backend.start()
    try:
        assert len(backend.upstreams) == NUM_INSTANCES
        assert backend.max_requests == NUM_INSTANCES * (MAX_SLOTS + QUEUE_LIMIT)
        assert await ask_worker("readiness", server.grpc_url, timeout_s=20) == "the model made a token"

        async def read(name: str, resume: Resume | None = None) -> Outcome:
            request = make_request(name, random_ids(1 + len(name), 9), max_tokens=40, temperature=1.0, resume=resume)
            return Outcome([event async for event in backend.submit(request).events()])

        names = [f"{'x' * number}" for number in range(1, 9)]
        firsts = await asyncio.gather(*(read(name) for name in names))
        for _ in range(2):
            resumes = [
                Resume(
                    state=first.end_state.state,
                    position=first.end_state.position,
                    fingerprint=backend.model.fingerprint,
                    generated_counts=first.end_state.generated_counts,
                )
                for first in firsts
            ]
            turns = (read(f"{name}-", resume) for name, resume in zip(names, resumes, strict=True))
            firsts = await asyncio.gather(*turns)
        stats = backend.upstream_stats()
        assert (stats.num_state_hits, stats.num_state_misses) == (16, 0)

        async def have_all_stepped() -> bool:  # by their heartbeats
            return all(upstream.counted.num_steps > 0 for upstream in backend.upstreams)

        await eventually(have_all_stepped)

        requests = [make_request(f"long-{number}", (0, 5), max_tokens=400, temperature=1.0) for number in range(4)]
        long = [backend.submit(request) for request in requests]
        streams = [generation.events() for generation in long]
        await asyncio.gather(*(anext(stream) for stream in streams))
        server.process.send_signal(signal.SIGTERM)
        for stream in streams:
            end = [event async for event in stream][-1]
            assert isinstance(end, Finished)
            assert (end.reason, end.completion_tokens) == ("length", 400)
        assert backend.upstream_stats().num_failovers == 0
    finally:
        await backend.stop()
    assert await asyncio.to_thread(server.process.wait, 60) == 0


async def test_an_instance_that_is_not_there_is_refused_by_name(server: RunningTriton) -> None:
    channel = TritonChannel(server.grpc_url)
    for _ in range(2 * NUM_INSTANCES):
        with pytest.raises(CallFailed) as caught:
            await channel.ask(encode_call(StatusCall()), timeout_s=10, instance="nsm_9")
        assert isinstance(caught.value.failure.error, InvalidRequest)
        assert "one of nsm_0_0, nsm_0_1" in str(caught.value)
    await channel.close()


async def test_a_server_that_answered_many_calls_lets_its_model_go(server: RunningTriton) -> None:
    """Triton 2.51 keeps calls that are cancelled while it sends their last answers; about one in a hundred did."""
    channel = TritonChannel(server.grpc_url)

    async def ask() -> None:
        for _ in range(50):
            await channel.ask(encode_call(StatusCall()), timeout_s=60)

    await asyncio.gather(*(ask() for _ in range(8)))
    await channel.close()
    assert await asyncio.to_thread(server.stop) == 0
