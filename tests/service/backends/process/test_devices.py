"""One backend on the engines of several devices."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from typing import Any

import pytest

from nsm_core.engine.request import Finished, Resume, SharedPrompt
from nsm_core.errors import ConfigError, EngineDead, InvalidRequest, Overloaded
from nsm_core.tokenizer import Tokenizer
from service.backends.base import Generation
from service.backends.process.backend import ProcessBackend
from service.backends.process.devices import DevicesBackend
from tests.nsm_core.engine.harness import make_request, random_ids
from tests.support.engine_process import devices_backend, engine_backends, engine_socket
from tests.support.gateway import gateway
from tests.support.models import local_backend
from tests.support.triton_servers import eventually

ENDLESS = 20_000


async def end_of(generation: Generation) -> Finished:
    events = [event async for event in generation.events()]
    assert isinstance(events[-1], Finished)
    return events[-1]


async def begun(backend: DevicesBackend, name: str, max_tokens: int = ENDLESS) -> Generation:
    generation = backend.submit(make_request(name, random_ids(1, 5), max_tokens=max_tokens))
    await anext(generation.events())
    return generation


async def is_up(backend: DevicesBackend, wanted: list[bool]) -> bool:
    return [stats.is_up for stats in backend.device_stats()] == wanted


async def test_requests_are_spread_and_refused_when_all_are_full(tiny_tokenizer: Tokenizer) -> None:
    engines = [local_backend(tiny_tokenizer, max_slots=2, queue_limit=0) for _ in range(2)]
    async with devices_backend(*engines) as backend:
        generations = [await begun(backend, str(number)) for number in range(4)]
        assert [stats.num_requests for stats in backend.device_stats()] == [2, 2]
        with pytest.raises(Overloaded):
            backend.submit(make_request("one too many"))
        with pytest.raises(InvalidRequest, match="in use"):
            backend.submit(make_request("3"))
        for generation in generations:
            generation.cancel()
            assert (await end_of(generation)).reason == "abort"


async def test_a_request_that_an_engine_refuses_late_goes_to_the_next(tiny_tokenizer: Tokenizer) -> None:
    """Requests that the gateway does not know of, as those of another one that it has not heard of yet."""
    engines = [local_backend(tiny_tokenizer, max_slots=1, queue_limit=0) for _ in range(3)]
    body = {"prompt": "x", "max_tokens": 3, "seed": 1, "ignore_eos": True}
    async with (
        engine_backends(*engines) as backends,
        gateway(DevicesBackend([("cpu", backend) for backend in backends])) as server,
    ):
        fillings, texts = [], []
        for engine in engines:
            fillings.append(engine.submit(make_request("fills", max_tokens=ENDLESS)))
            await anext(fillings[-1].events())
            answer = await server.client.post("/v1/completions", json=body)
            texts.append(answer.json()["choices"][0]["text"] if answer.status_code == 200 else answer.status_code)
        assert texts == [texts[0], texts[0], 503]
        assert answer.json()["error"]["code"] == "overloaded"
        assert int(answer.headers["retry-after"]) > 0
        for filling in fillings:
            filling.cancel()
            await end_of(filling)


async def test_a_request_that_moved_on_is_cancelled_where_it_is(tiny_tokenizer: Tokenizer) -> None:
    engines = [local_backend(tiny_tokenizer, max_slots=1, queue_limit=0) for _ in range(2)]
    async with devices_backend(*engines) as backend:
        filling = engines[0].submit(make_request("fills", max_tokens=ENDLESS))
        await anext(filling.events())
        moved = await begun(backend, "moves")
        assert [stats.num_requests for stats in backend.device_stats()][1] == 1
        for generation in (moved, filling):
            generation.cancel()
            assert (await end_of(generation)).reason == "abort"


async def test_choices_of_one_prompt_go_to_one_engine(tiny_tokenizer: Tokenizer) -> None:
    async with devices_backend(*(local_backend(tiny_tokenizer, max_slots=4) for _ in range(2))) as backend:
        requests = [make_request(str(number), random_ids(1, 70), max_tokens=4, seed=number) for number in range(3)]
        shared = [dataclasses.replace(request, shared_prompt=SharedPrompt("p", 3)) for request in requests]
        await asyncio.gather(*(end_of(backend.submit(request)) for request in shared))

        async def was_read_once() -> bool:
            return backend.stats().tokens_computed == 70 + 2

        await eventually(was_read_once)


async def test_an_engine_that_is_lost_takes_its_own_requests_and_no_others(tiny_tokenizer: Tokenizer) -> None:
    one, two = (local_backend(tiny_tokenizer, max_slots=4) for _ in range(2))
    async with contextlib.AsyncExitStack() as second:
        async with engine_socket(one) as first_path:
            second_path = await second.enter_async_context(engine_socket(two))
            backend = DevicesBackend([("cpu", ProcessBackend(first_path)), ("cpu", ProcessBackend(second_path))])
            await backend.start()
            lost, other = await begun(backend, "a"), await begun(backend, "b", 500)

            async def has_stepped() -> bool:
                return all(engine.stats().num_steps > 0 for engine in (one, two)) and backend.stats().num_steps > 1

            await eventually(has_stepped)
        end = await end_of(lost)
        assert end.reason == "abort" or isinstance(end.error, EngineDead)
        num_steps = backend.stats().num_steps
        await eventually(lambda: is_up(backend, [False, True]))
        assert backend.is_ready()
        assert (await end_of(other)).completion_tokens == 500
        for number in range(3):
            assert (await end_of(backend.submit(make_request(f"later-{number}", max_tokens=3)))).completion_tokens == 3
        assert backend.stats().num_steps >= num_steps  # of the process that ended too
        await backend.stop()
        with pytest.raises(EngineDead):
            backend.submit(make_request("late"))


async def test_devices_that_compute_in_different_ways_are_refused(tiny_tokenizer: Tokenizer) -> None:
    engines = [local_backend(tiny_tokenizer), local_backend(tiny_tokenizer)]
    engines[1]._model = dataclasses.replace(engines[1].model, numerics="another/class")
    with pytest.raises(ConfigError, match=r"must compute alike: cpu as .*, cpu as another/class"):
        async with devices_backend(*engines):
            raise AssertionError("it serves")


async def test_a_held_state_leads_to_its_engine_and_has_one_name_in_all(tiny_tokenizer: Tokenizer) -> None:
    async with devices_backend(*(local_backend(tiny_tokenizer, max_slots=4) for _ in range(2))) as backend:
        alone = await end_of(backend.submit(make_request("whole", random_ids(1, 20), max_tokens=12)))
        ends = []
        for number in range(4):
            request = make_request(f"first-{number}", random_ids(1, 20), max_tokens=5)
            ends.append(await end_of(backend.submit(dataclasses.replace(request, hold_state=True))))
        owners = [end.end_state.held % 2 for end in ends if end.end_state and end.end_state.held is not None]
        assert sorted(owners) == [0, 0, 1, 1]
        for number, end in enumerate(ends):
            state = end.end_state
            assert state is not None
            assert state.pending is not None
            assert state.held is not None
            resume = Resume(
                state=b"",
                position=state.position,
                fingerprint=backend.model.fingerprint,
                generated_counts=state.generated_counts,
                held=state.held,
            )
            request = make_request(f"second-{number}", (state.pending,), resume=resume, max_tokens=7)
            second = await end_of(backend.submit(request))
            assert second.end_state is not None
            assert alone.end_state is not None
            assert (*state.new_ids[:-1], *second.end_state.new_ids) == alone.end_state.new_ids
            backend.name_state("session", state.held, str(number).encode())
            found = await backend.find_state("session")
            assert found is not None
            assert (found.number, found.about) == (state.held, str(number).encode())
            assert len(await backend.fetch_state(found.number) or b"") == backend.model.state_bytes
        backend.forget_state("session")
        assert await backend.find_state("session") is None


async def test_turns_of_a_full_engine_go_on_in_the_other(tiny_tokenizer: Tokenizer) -> None:
    engines = [local_backend(tiny_tokenizer, max_slots=1, queue_limit=0) for _ in range(2)]
    for engine in engines:  # of others each turn stores its state
        engine._model = dataclasses.replace(engine.model, replays_exactly=True)
    async with engine_backends(*engines) as (one, two):
        backend = DevicesBackend([("cpu", one), ("cpu", two)])
        async with gateway(backend) as server:

            async def post(path: str, **body: object) -> tuple[int, dict[str, Any]]:
                body = {"input": "x", **body}
                answer = await server.client.post(f"/v1/sessions{path}", json=body if path else {"id": "s"})
                return answer.status_code, answer.json()

            async def owner() -> ProcessBackend:
                held = await backend.find_state("default/s")
                assert held is not None
                return (one, two)[held.number % 2]

            turn = {"max_tokens": 3, "ignore_eos": True}
            assert (await post(""))[0] == 200
            assert (await post("/s/generate", **turn))[0] == 200
            for path, body in (("/s/generate", turn), ("/s/generate", turn), ("/s/append", {})):
                first = await owner()
                filling = first.submit(make_request("fills", random_ids(1, 5), max_tokens=ENDLESS))
                await anext(filling.events())
                status, answer = await post(path, **body)
                assert status == 200, answer
                assert path == "/s/append" or await owner() is not first
                filling.cancel()
                await end_of(filling)
            assert server.metric("nsm_replayed_tokens_total") == 0
