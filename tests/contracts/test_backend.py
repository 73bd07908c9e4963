"""What every inference backend must do. A new backend is one more param of the fixture."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from nsm_core.engine.request import (
    EndState,
    Finished,
    FinishReason,
    GenerationRequest,
    PromptScored,
    Resume,
    SharedPrompt,
    TokenEvent,
)
from nsm_core.errors import EngineDead, InvalidRequest, NsmError, Overloaded, SnapshotCorrupt, StateMismatch
from nsm_core.tokenizer import Tokenizer
from service.backends.base import InferenceBackend
from tests.nsm_core.engine.harness import Outcome, make_request, random_ids
from tests.support.backends import BACKENDS, triton_backend
from tests.support.engine_process import devices_backend, process_backend
from tests.support.models import local_backend
from tests.support.rwkv7 import rwkv7_backend
from tests.support.triton_servers import MAX_SLOTS, QUEUE_LIMIT, eventually


# Each serves a model over the same tokenizer, with MAX_SLOTS rows and QUEUE_LIMIT places in its queue.
@pytest_asyncio.fixture(params=[*BACKENDS, "process", "devices"])
async def backend(request: pytest.FixtureRequest, tiny_tokenizer: Tokenizer) -> AsyncIterator[InferenceBackend]:
    if request.param == "local":
        backend: InferenceBackend = local_backend(tiny_tokenizer, max_slots=MAX_SLOTS, queue_limit=QUEUE_LIMIT)
    elif request.param == "process":
        engine = local_backend(tiny_tokenizer, max_slots=MAX_SLOTS, queue_limit=QUEUE_LIMIT)
        async with process_backend(engine) as backend:
            yield backend
        return
    elif request.param == "devices":
        each = {"max_slots": MAX_SLOTS // 2, "queue_limit": QUEUE_LIMIT // 2}
        async with devices_backend(*(local_backend(tiny_tokenizer, **each) for _ in range(2))) as backend:
            yield backend
        return
    elif request.param == "rwkv7":
        backend = rwkv7_backend(tiny_tokenizer, max_slots=MAX_SLOTS, queue_limit=QUEUE_LIMIT)
    else:
        backend = triton_backend(request.getfixturevalue("triton"))
    await backend.start()
    yield backend
    await backend.stop()


async def generate(backend: InferenceBackend, request: GenerationRequest) -> Outcome:
    return Outcome([event async for event in backend.submit(request).events()])


def resume_of(backend: InferenceBackend, end: EndState) -> Resume:
    return Resume(
        state=end.state,
        position=end.position,
        fingerprint=backend.model.fingerprint,
        generated_counts=end.generated_counts,
    )


async def test_the_model_is_described(backend: InferenceBackend, tiny_tokenizer: Tokenizer) -> None:
    model = backend.model
    assert backend.tokenizer.fingerprint == tiny_tokenizer.fingerprint
    assert model.vocab_size == tiny_tokenizer.vocab_size
    assert model.num_parameters > 0
    assert all((model.name, model.fingerprint, model.numerics, model.chat_template))
    assert sum(tensor.num_bytes for tensor in model.state_layout) == model.state_bytes
    end = (await generate(backend, make_request())).end_state
    assert len(end.state) == model.state_bytes
    assert backend.max_requests == MAX_SLOTS + QUEUE_LIMIT


async def test_events_come_in_order_and_end_with_one_finished(backend: InferenceBackend) -> None:
    request = make_request(prompt_ids=random_ids(1, 50), prompt_logprobs=1, logprobs=2, max_tokens=6)
    outcome = await generate(backend, request)
    assert [type(event) for event in outcome.events] == [PromptScored, *[TokenEvent] * 6, Finished]
    assert [token.index for token in outcome.tokens] == [1, 2, 3, 4, 5, 6]
    assert outcome.text == backend.tokenizer.decode(outcome.ids)
    assert outcome.scored.logprobs[0] is None
    assert [score.token_id for score in outcome.scored.logprobs[1:] if score] == list(request.prompt_ids[1:])
    for token in outcome.tokens:
        assert token.logprob is not None
        assert token.logprob.token_id == token.token_id == token.logprob.top[0][0]
        assert len(token.logprob.top) == 2
    finished = outcome.finished
    assert finished.reason is FinishReason.LENGTH
    assert (finished.prompt_tokens, finished.cached_tokens, finished.completion_tokens) == (50, 0, 6)


async def test_a_turn_continues_where_the_last_one_ended(backend: InferenceBackend) -> None:
    whole = await generate(backend, make_request(prompt_ids=random_ids(1, 20), max_tokens=12))
    first = await generate(backend, make_request(prompt_ids=random_ids(1, 20), max_tokens=5))
    end = first.end_state
    assert end.pending is not None
    request = make_request(prompt_ids=(end.pending,), resume=resume_of(backend, end), max_tokens=7)
    second = await generate(backend, request)
    assert first.ids + second.ids == whole.ids
    assert second.finished.cached_tokens == end.position == 24
    assert second.finished.prompt_tokens == 25
    assert second.end_state.position == whole.end_state.position


def token_text_within(tokenizer: Tokenizer, outcome: Outcome) -> str:
    """The text of a token behind the first ones, which nothing before it contains. Not every token is whole UTF-8."""
    for index in range(4, len(outcome.ids)):
        raw = tokenizer.token_bytes(outcome.ids[index])
        if raw.isascii() and outcome.text.find(raw.decode()) == len(tokenizer.decode(outcome.ids[:index])):
            return raw.decode()
    raise AssertionError(f"no token of {outcome.text!r} can be a stop string")


async def test_a_stop_string_ends_a_turn_and_is_not_kept(backend: InferenceBackend) -> None:
    free = await generate(backend, make_request(prompt_ids=random_ids(1, 20), max_tokens=20, temperature=1.0))
    stop = token_text_within(backend.tokenizer, free)
    request = make_request(prompt_ids=random_ids(1, 20), max_tokens=20, temperature=1.0, stop=(stop,))
    stopped = await generate(backend, request)
    finished = stopped.finished
    assert (finished.reason, finished.stop_reason) == (FinishReason.STOP, stop)
    assert stopped.text == free.text[: free.text.index(stop)]
    assert finished.completion_tokens == len(stopped.ids)
    assert finished.num_dropped_tokens >= 1
    end = stopped.end_state
    assert backend.tokenizer.decode(end.new_ids[20:]) == stopped.text
    assert end.position == len(end.new_ids) - (end.pending is not None)


async def test_a_stop_id_ends_a_turn(backend: InferenceBackend) -> None:
    free = await generate(backend, make_request(max_tokens=5, temperature=1.0))
    stopped = await generate(backend, make_request(max_tokens=5, temperature=1.0, stop_token_ids=(free.ids[3],)))
    assert stopped.ids == free.ids[:4]
    assert (stopped.finished.stop_reason, stopped.finished.num_dropped_tokens) == (free.ids[3], 1)
    assert stopped.end_state.pending is None
    assert stopped.end_state.new_ids == (0, *free.ids[:3])


async def test_neighbours_change_nothing(backend: InferenceBackend) -> None:
    requests = [
        make_request(str(number), random_ids(number, 5 + 9 * (number % 8)), max_tokens=6, temperature=1.0, seed=number)
        for number in range(MAX_SLOTS + QUEUE_LIMIT)
    ]
    alone = [await generate(backend, request) for request in requests]
    together = await asyncio.gather(*(generate(backend, request) for request in requests))
    assert [outcome.ids for outcome in together] == [outcome.ids for outcome in alone]


async def test_requests_that_share_a_prompt_give_what_each_gives_alone(backend: InferenceBackend) -> None:
    requests = [
        make_request(str(number), random_ids(1, 70), max_tokens=6, temperature=1.0, seed=number) for number in range(4)
    ]
    alone = [await generate(backend, request) for request in requests]
    shared = [dataclasses.replace(request, shared_prompt=SharedPrompt("p", 4)) for request in requests]
    together = await asyncio.gather(*(generate(backend, request) for request in shared))
    assert [outcome.ids for outcome in together] == [outcome.ids for outcome in alone]
    assert [outcome.finished.prompt_tokens for outcome in together] == [70] * 4

    async def is_counted() -> bool:  # what happens in other processes is told a little later
        return backend.stats().tokens_computed == 4 * 70 + 70 + 3

    await eventually(is_counted)


async def test_S6_cancel_ends_a_request_with_abort_and_no_state(backend: InferenceBackend) -> None:
    generation = backend.submit(make_request(max_tokens=100_000))
    outcome = Outcome()
    async for event in generation.events():
        outcome.events.append(event)
        if len(outcome.tokens) == 2:
            generation.cancel()
            generation.cancel()
    finished = outcome.finished
    assert (finished.reason, finished.end_state, finished.error) == (FinishReason.ABORT, None, None)
    assert finished.completion_tokens == len(outcome.tokens) < 100_000
    assert backend.stats().num_running == 0


async def test_batches_are_the_same_events(backend: InferenceBackend) -> None:
    request = make_request(prompt_ids=random_ids(1, 50), prompt_logprobs=1, max_tokens=6)
    batches = [batch async for batch in backend.submit(request).batches()]
    assert all(batches)
    assert [event for batch in batches for event in batch] == (await generate(backend, request)).events


async def test_the_queue_is_bounded(backend: InferenceBackend) -> None:
    names = [str(number) for number in range(MAX_SLOTS + QUEUE_LIMIT)]
    backend.require_room()
    generations = [backend.submit(make_request(name, max_tokens=100_000)) for name in names]
    with pytest.raises(Overloaded):
        backend.submit(make_request("one too many"))
    with pytest.raises(Overloaded):
        backend.require_room()
    for generation in generations:
        generation.cancel()
    for generation in generations:
        outcome = Outcome([event async for event in generation.events()])
        assert outcome.finished.reason is FinishReason.ABORT
    assert (await generate(backend, make_request("now there is room"))).finished.reason is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"fingerprint": "another model"}, StateMismatch),
        ({"position": 1000}, SnapshotCorrupt),
        ({"state": b"short"}, SnapshotCorrupt),
    ],
    ids=["fingerprint", "position", "length"],
)
async def test_R2_a_state_that_does_not_fit_is_refused_at_once(
    change: dict[str, object], error: type[NsmError], backend: InferenceBackend
) -> None:
    end = (await generate(backend, make_request())).end_state
    good = resume_of(backend, end)
    fields = {name: getattr(good, name) for name in ("state", "position", "fingerprint", "generated_counts")}
    with pytest.raises(error):
        backend.submit(make_request(resume=Resume(**{**fields, **change})))


async def test_bad_requests_are_refused_at_once(backend: InferenceBackend) -> None:
    for request in (make_request(prompt_ids=()), make_request(prompt_ids=(backend.model.vocab_size,))):
        with pytest.raises(InvalidRequest):
            backend.submit(request)


async def test_counters_rise_by_what_was_done(backend: InferenceBackend) -> None:
    first = await generate(backend, make_request(prompt_ids=random_ids(1, 40), max_tokens=3))
    resume = resume_of(backend, first.end_state)
    await generate(backend, make_request(prompt_ids=(1, 2, 3, 4, 5), resume=resume, max_tokens=4))

    async def has_stepped() -> bool:  # what happens in other processes is told a little later
        return backend.stats().num_steps >= 7 and backend.stats().num_running == 0

    await eventually(has_stepped)
    stats = backend.stats()
    assert (stats.tokens_computed, stats.tokens_resumed, stats.tokens_generated) == (45, 42, 7)
    assert (stats.num_running, stats.num_waiting, stats.max_slots) == (0, 0, MAX_SLOTS)
    assert stats.state_pool_bytes == MAX_SLOTS * backend.model.state_bytes
    assert stats.step_seconds > 0


async def test_stop_ends_what_runs_and_refuses_what_comes(backend: InferenceBackend) -> None:
    assert backend.is_ready()
    generations = [backend.submit(make_request(str(number), max_tokens=100_000)) for number in range(3)]
    await backend.stop()
    for generation in generations:
        outcome = Outcome([event async for event in generation.events()])
        assert outcome.finished.reason is FinishReason.ABORT
    assert not backend.is_ready()
    with pytest.raises(EngineDead):
        backend.submit(make_request("late"))
    await backend.stop()


async def test_a_state_is_described_beside_the_start(backend: InferenceBackend) -> None:
    start = await backend.inspect_state(None)
    assert (start.position, start.num_bytes) == (0, backend.model.state_bytes)
    with pytest.raises(SnapshotCorrupt):
        await backend.inspect_state(b"short")
