from __future__ import annotations

import asyncio
import dataclasses
import socket
import threading
from pathlib import Path

import pytest

from nsm_core.engine.generation_handle import GenerationHandle
from nsm_core.engine.request import Finished, GenerationRequest, NamedState, Resume
from nsm_core.errors import ConfigError, EngineDead, Overloaded
from nsm_core.tokenizer import Tokenizer
from service.backends.process.backend import ProcessBackend
from service.backends.process.server import EngineServer, refuse
from tests.nsm_core.engine.harness import make_request, random_ids
from tests.support.engine_process import engine_socket
from tests.support.models import local_backend
from tests.support.triton_servers import eventually

WAIT_S = 60.0


def request(name: str, max_tokens: int = 8) -> GenerationRequest:
    return make_request(name, random_ids(1, 5), max_tokens=max_tokens)


async def end_of(generation: GenerationHandle) -> Finished:
    events = [event async for event in generation.events()]
    assert isinstance(events[-1], Finished)
    return events[-1]


async def test_two_gateways_share_an_engine_and_its_queue(tiny_tokenizer: Tokenizer) -> None:
    async with engine_socket(local_backend(tiny_tokenizer, max_slots=1, queue_limit=1)) as path:
        one, two = ProcessBackend(path), ProcessBackend(path, reports_engine=False)
        await asyncio.gather(one.start(), two.start())
        long = one.submit(request("a", 20_000))
        queued = two.submit(request("b", 20_000))
        await asyncio.wait_for(_until_full(one), WAIT_S)
        with pytest.raises(Overloaded, match="the engine takes 2 requests"):
            one.submit(request("c"))
        assert (one.stats().max_slots, two.stats().max_slots) == (1, 0)
        await one.stop()
        assert (await end_of(long)).reason == "abort"
        queued.cancel()
        await two.stop()
        assert (await end_of(queued)).reason == "abort"


async def _until_full(backend: ProcessBackend) -> None:
    while True:
        try:
            backend.require_room()
        except Overloaded:
            return
        await asyncio.sleep(0.01)


async def test_requests_of_a_gateway_that_leaves_end_and_free_the_engine(tiny_tokenizer: Tokenizer) -> None:
    engine = local_backend(tiny_tokenizer, max_slots=1, queue_limit=0)
    async with engine_socket(engine) as path:
        one, two = ProcessBackend(path), ProcessBackend(path)
        await asyncio.gather(one.start(), two.start())
        one.submit(request("a", 20_000))
        assert one._writer is not None
        one._writer.close()  # as when its process is killed
        async with asyncio.timeout(WAIT_S):
            while True:
                try:
                    finished = await end_of(two.submit(request("b")))
                except Overloaded:
                    pass  # the engine still has the other's
                else:
                    if finished.error is None:
                        break
                await asyncio.sleep(0.01)
        await asyncio.gather(one.stop(), two.stop())


async def test_an_engine_waits_until_its_gateways_have_left(tiny_tokenizer: Tokenizer, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(tmp_path / "engine.sock"))
        sock.listen()
        engine = local_backend(tiny_tokenizer)
        await engine.start()
        server = EngineServer(engine)
        await server.serve(sock.dup())
        await server.wait_until_left(within_s=WAIT_S)  # none has come
        one, two = ProcessBackend(tmp_path / "engine.sock"), ProcessBackend(tmp_path / "engine.sock")
        await asyncio.gather(one.start(), two.start())
        waiting = asyncio.create_task(server.wait_until_left(within_s=WAIT_S))
        await one.stop()
        generation = two.submit(request("a"))
        assert (await end_of(generation)).error is None
        assert not waiting.done()
        await server.wait_until_left(within_s=0.0)  # it need not wait for ever
        await two.stop()
        await asyncio.wait_for(waiting, WAIT_S)
        await engine.stop()
        await server.stop()


async def test_an_engine_that_is_lost_ends_requests_and_one_that_takes_its_place_serves(
    tiny_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(tmp_path / "engine.sock"))
        sock.listen()
        first = local_backend(tiny_tokenizer)
        await first.start()
        server = EngineServer(first)
        await server.serve(sock.dup())
        backend = ProcessBackend(tmp_path / "engine.sock")
        await backend.start()
        generation = backend.submit(request("a", 20_000))
        await server.stop()
        error = (await end_of(generation)).error
        assert isinstance(error, EngineDead)
        assert str(error) == "the engine's process ended"
        with pytest.raises(EngineDead, match="starting again"):
            backend.require_room()
        with pytest.raises(EngineDead, match="starting again"):
            await backend.inspect_state(None)
        assert not backend.is_ready()
        await first.stop()
        second = local_backend(tiny_tokenizer)
        await second.start()
        server = EngineServer(second)
        await server.serve(sock.dup())

        async def is_back() -> bool:
            return backend.is_ready()

        await eventually(is_back, seconds=WAIT_S)
        assert (await end_of(backend.submit(request("a")))).error is None
        await backend.stop()
        await second.stop()
        await server.stop()


async def test_an_engine_that_cannot_start_says_why(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(tmp_path / "engine.sock"))
        sock.listen()
        refusing = threading.Thread(target=refuse, args=(sock, "no model /none"))
        refusing.start()
        with pytest.raises(ConfigError, match="no model /none"):
            await ProcessBackend(tmp_path / "engine.sock").start()
        refusing.join()


async def test_a_state_that_one_gateway_leaves_with_the_engine_is_gone_on_from_by_another(
    tiny_tokenizer: Tokenizer,
) -> None:
    async with engine_socket(local_backend(tiny_tokenizer)) as path:
        one, two = ProcessBackend(path), ProcessBackend(path)
        await asyncio.gather(one.start(), two.start())
        first = await end_of(one.submit(dataclasses.replace(request("a"), hold_state=True)))
        plain = await end_of(one.submit(request("b")))
        assert first.end_state is not None
        assert plain.end_state is not None
        held = first.end_state.held
        assert held is not None
        assert first.end_state.state == b""
        assert await two.find_state("mine") is None
        one.name_state("mine", held, b"about it")
        found = await one.find_state("mine")
        assert found is not None
        assert (found, await two.find_state("mine")) == (NamedState(held, b"about it"), found)
        assert await two.fetch_state(held) == plain.end_state.state

        def resume(state: bytes, held: int | None) -> Resume:
            return Resume(state=state, held=held, position=12, fingerprint=one.model.fingerprint, generated_counts={})

        ends = [
            await end_of(backend.submit(dataclasses.replace(request("c"), resume=start)))
            for backend, start in ((two, resume(b"", held)), (one, resume(plain.end_state.state, None)))
        ]
        assert ends[0] == ends[1]
        two.forget_state("mine")
        assert await two.find_state("mine") is None
        assert await one.fetch_state(held) is None
        gone = await end_of(one.submit(dataclasses.replace(request("d"), resume=resume(b"", held))))
        assert isinstance(gone.error, EngineDead)
        await asyncio.gather(one.stop(), two.stop())


async def test_states_of_megabytes_cross_whole_beside_each_other_and_beside_tokens(
    tiny_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    states, is_asked = [bytes([number]) * (2**21 + number) for number in range(3)], asyncio.Event()

    async def fetch(number: int) -> bytes:
        is_asked.set()
        return states[number]

    engine = local_backend(tiny_tokenizer)
    monkeypatch.setattr(engine, "fetch_state", fetch)
    async with engine_socket(engine) as path:
        one = ProcessBackend(path)
        await one.start()
        abandoned = asyncio.create_task(one.fetch_state(0))
        await is_asked.wait()
        stream = one.submit(request("a", 64))
        abandoned.cancel()
        assert await asyncio.gather(one.fetch_state(1), one.fetch_state(2)) == states[1:]
        assert (await end_of(stream)).completion_tokens == 64
        assert not one._parts
        await one.stop()
