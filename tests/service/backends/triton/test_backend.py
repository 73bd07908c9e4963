"""A gateway's side of Triton: when servers break, hang, fill up, forget a state or serve something else."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from nsm_core.engine.request import FinishReason, GenerationRequest, PromptScored, PromptState, Resume
from nsm_core.errors import (
    DeadlineExceeded,
    EngineDead,
    InvalidRequest,
    NumericalError,
    Overloaded,
    SnapshotCorrupt,
)
from nsm_core.tokenizer import Tokenizer
from nsm_core.wire.calls import DescribeCall, StatusCall
from service.backends.triton import generation as triton_generation
from service.backends.triton.backend import TritonBackend
from tests.nsm_core.engine.harness import TOLERANCE, Outcome, assert_same_state, make_request, random_ids, small_model
from tests.support.triton_servers import eventually
from tests.support.triton_stand_in import (
    MAX_SLOTS,
    QUEUE_LIMIT,
    StandIn,
    hurry,
    is_up,
    random_loaded,
    running_backend,
    stand_ins,
)

TEXT: dict[str, Any] = {"prompt_ids": random_ids(1, 40), "temperature": 1.0, "max_tokens": 12, "seed": 3}
STATES = small_model()  # for the layout of its states


@dataclasses.dataclass
class TwoServers:
    """A gateway's backend on two servers; a fresh one goes to `one` first."""

    one: StandIn
    two: StandIn
    backend: TritonBackend

    @property
    def servers(self) -> tuple[StandIn, StandIn]:
        return self.one, self.two

    async def generate(self, request: GenerationRequest) -> Outcome:
        return Outcome([event async for event in self.backend.submit(request).events()])

    async def turns(self) -> tuple[Outcome, GenerationRequest]:
        """A turn, and the request that goes on from its state."""
        first = await self.generate(make_request("first", **TEXT))
        end = first.end_state
        resume = Resume(
            state=end.state,
            position=end.position,
            fingerprint=self.backend.model.fingerprint,
            generated_counts=end.generated_counts,
        )
        prompt_ids = (*(() if end.pending is None else (end.pending,)), 7, 8)
        return first, make_request("second", **{**TEXT, "prompt_ids": prompt_ids}, resume=resume, logprobs=1)


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    hurry(monkeypatch)


@pytest.fixture
async def pair(tiny_tokenizer: Tokenizer) -> AsyncIterator[TwoServers]:
    one, two = (StandIn(random_loaded(tiny_tokenizer)) for _ in range(2))
    async with stand_ins(one, two), running_backend(one, two) as backend:
        yield TwoServers(one, two, backend)


def assert_same(got: Outcome, want: Outcome) -> None:
    """What a client sees, and what a session keeps: tokens that are read again round a state in another order."""
    assert got.text == want.text
    for one, other in zip(got.tokens, want.tokens, strict=True):
        assert (one.index, one.token_id, one.text) == (other.index, other.token_id, other.text)
        if other.logprob is not None:
            assert one.logprob is not None
            assert one.logprob.logprob == pytest.approx(other.logprob.logprob, abs=TOLERANCE)
    ends = [dataclasses.replace(outcome.end_state, state=b"") for outcome in (got, want)]
    assert ends[0] == ends[1]
    assert_same_state(STATES, got.end_state.state, STATES.state_spec.unpack(want.end_state.state))
    assert dataclasses.replace(got.finished, end_state=None) == dataclasses.replace(want.finished, end_state=None)


async def test_S1_every_place_of_a_turn_may_be_the_break(pair: TwoServers) -> None:
    """A turn that resumes a state, and loses both servers after any number of answers, gives each token once."""
    _, request = await pair.turns()
    want = await pair.generate(request)
    counts: set[int] = set()
    for number, break_after in itertools.product(range(5), range(1, len(want.ids) + 1)):
        await eventually(lambda: is_up(pair.backend, 2))
        pair.one.break_after = pair.two.break_after = break_after
        got = await pair.generate(dataclasses.replace(request, request_id=f"broken-{number}-{break_after}"))
        assert_same(got, want)
        counts = {len(options.get("sampled_ids", ())) for server in pair.servers for options in server.options}
        if break_after == len(want.ids) and len(counts) > len(want.ids) // 2:
            break  # else answers held several tokens, on a busy machine: once more
    assert len(counts) > len(want.ids) // 2
    assert pair.backend.upstream_stats().num_failovers >= len(counts - {0})


async def test_a_heartbeat_on_its_way_does_not_clear_a_server_whose_stream_broke_meanwhile(
    pair: TwoServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = next(iter(pair.backend.upstreams))
    ask, described = one.ask, asyncio.Event()

    async def answer(call: Any, **options: Any) -> Any:
        got = await ask(call, **options)
        if isinstance(call, StatusCall) and not described.is_set():
            one.suspect()
        if isinstance(call, DescribeCall):
            assert not one.is_up
            described.set()
        return got

    monkeypatch.setattr(one, "ask", answer)
    await asyncio.wait_for(described.wait(), 60)
    await eventually(lambda: is_up(pair.backend, 2))
    assert one.max_slots == MAX_SLOTS


async def test_what_was_told_of_the_prompt_is_not_told_again(pair: TwoServers) -> None:
    request = make_request("a", **TEXT, prompt_logprobs=1)
    request = dataclasses.replace(request, keep_states_at=(5, 10, 40))
    want = await pair.generate(request)
    assert [type(event) for event in want.events[:4]].count(PromptState) == 3
    for break_after in range(1, 6):
        await eventually(lambda: is_up(pair.backend, 2))
        pair.one.break_after = pair.two.break_after = break_after
        got = await pair.generate(dataclasses.replace(request, request_id=f"broken-{break_after}"))
        kinds = [type(event) for event in got.events]
        assert (kinds.count(PromptScored), kinds.count(PromptState)) == (1, 3)
        assert_same(got, want)


async def test_a_request_that_breaks_every_server_ends_with_an_error(pair: TwoServers) -> None:
    pair.one.fail_with = pair.two.fail_with = EngineDead("the engine failed")
    finished = (await pair.generate(make_request(**TEXT))).finished
    assert (finished.reason, type(finished.error)) == (FinishReason.ERROR, EngineDead)
    assert len(pair.one.options) + len(pair.two.options) == triton_generation.MAX_LOSSES + 1


async def test_R6_a_state_moves_only_when_its_server_lacks_it(pair: TwoServers) -> None:
    _, request = await pair.turns()
    want = await pair.generate(request)
    assert pair.one.state_sizes == [0, 0]  # the first turn, and the next one with the id alone
    assert pair.one.worker.status().states.num_hits == 1
    await pair.one.stop()
    await eventually(lambda: is_up(pair.backend, 1))
    await pair.one.start()  # its kept states are gone
    await eventually(lambda: is_up(pair.backend, 2))
    again = await pair.generate(dataclasses.replace(request, request_id="again"))
    assert_same(again, want)
    assert (pair.one.state_sizes + pair.two.state_sizes)[2:] in (
        [0, len(request.resume.state)],
        [len(request.resume.state)],
    )
    stats = pair.backend.upstream_stats()
    assert (stats.num_state_hits, stats.num_state_misses) == (1, 1)


async def test_a_server_that_began_anew_between_two_heartbeats_is_asked_again_what_it_serves(pair: TwoServers) -> None:
    """Another model might answer at its address; what it was given meanwhile is given up."""
    want = await pair.generate(make_request("want", **TEXT))
    await eventually(lambda: has_stepped(pair.backend))
    await pair.one.stop()
    await pair.one.start()
    got = await pair.generate(make_request("got", **TEXT))
    assert_same(got, want)
    await eventually(lambda: is_up(pair.backend, 2))


async def has_stepped(backend: TritonBackend) -> bool:
    return backend.stats().num_steps > 0


async def test_what_the_servers_hold_is_what_they_say_also_while_one_is_down(pair: TwoServers) -> None:
    each = MAX_SLOTS + QUEUE_LIMIT
    assert pair.backend.max_requests == 2 * each
    await pair.one.stop()
    await eventually(lambda: is_up(pair.backend, 1))
    assert pair.backend.max_requests == 2 * each  # more is refused for good, and it may be back soon
    assert pair.backend.stats().max_slots == MAX_SLOTS


async def test_the_server_with_the_least_to_do_gets_the_request(pair: TwoServers) -> None:
    long = {**TEXT, "max_tokens": 100_000}
    generations = [pair.backend.submit(make_request(str(number), **long)) for number in range(2 * MAX_SLOTS)]
    await asyncio.gather(*(anext(generation.events()) for generation in generations))
    assert [len(server.options) for server in (pair.one, pair.two)] == [MAX_SLOTS, MAX_SLOTS]
    for generation in generations:
        generation.cancel()


async def test_T2_a_hung_server_loses_its_requests_and_its_place(pair: TwoServers) -> None:
    """Nothing breaks, nothing answers: only the heartbeat tells."""
    want = await pair.generate(make_request("want", **TEXT, logprobs=1))
    generation = pair.backend.submit(make_request("hung", **TEXT, logprobs=1))
    events = generation.events()
    got = Outcome([await anext(events)])
    busy = pair.one if len(pair.one.options) > len(pair.two.options) else pair.two
    busy.is_hung = True
    got.events += [event async for event in events]
    assert_same(got, want)


async def test_the_heartbeat_is_that_of_the_server_heard_last(pair: TwoServers) -> None:
    async def is_old() -> bool:
        return pair.backend.stats().heartbeat_age_s > 0.5

    async def is_fresh() -> bool:
        return pair.backend.stats().heartbeat_age_s < 0.3

    pair.one.is_hung = True
    await eventually(lambda: is_up(pair.backend, 1))
    await eventually(is_fresh)
    pair.two.is_hung = True
    await eventually(is_old)


async def test_without_a_server_requests_are_refused_until_one_comes_back(tiny_tokenizer: Tokenizer) -> None:
    server = StandIn(random_loaded(tiny_tokenizer))
    async with stand_ins(server), running_backend(server) as backend:
        pair = TwoServers(server, server, backend)
        want = await pair.generate(make_request("want", **TEXT))
        await server.stop()
        await eventually(lambda: is_up(backend, 0))
        assert not backend.is_ready()
        with pytest.raises(EngineDead):
            backend.submit(make_request("refused"))
        await server.start()
        await eventually(lambda: is_up(backend, 1))
        assert backend.is_ready()
        assert_same(await pair.generate(make_request("again", **TEXT)), want)


async def test_a_worker_that_drains_hands_its_requests_over(pair: TwoServers) -> None:
    want = await pair.generate(make_request("want", **{**TEXT, "max_tokens": 150}))
    generation = pair.backend.submit(make_request("moved", **{**TEXT, "max_tokens": 150}))
    events = generation.events()
    got = Outcome([await anext(events)])
    await (pair.two if len(pair.two.options) else pair.one).stop(grace_s=5.0)
    got.events += [event async for event in events]
    assert_same(got, want)


async def test_T7_a_server_that_is_stopping_keeps_its_streams_and_gets_no_more(pair: TwoServers) -> None:
    generation = pair.backend.submit(make_request("long", **{**TEXT, "max_tokens": 400}))
    events = generation.events()
    got = Outcome([await anext(events)])
    stopping, other = pair.servers if pair.one.options else reversed(pair.servers)
    stopping.is_unloading = True

    async def is_seen() -> bool:
        return pair.backend.upstream_stats().num_down == 1

    await eventually(is_seen)
    await pair.generate(make_request("new", **TEXT))
    got.events += [event async for event in events]
    assert (len(got.ids), got.finished.reason) == (400, FinishReason.LENGTH)
    assert (len(stopping.options), len(other.options)) == (1, 1)
    assert pair.backend.upstream_stats().num_failovers == 0


async def test_a_full_worker_is_overloaded_in_the_end(pair: TwoServers) -> None:
    pair.one.fail_with = Overloaded("the queue is full", retry_after_s=3.0)
    finished = (await pair.generate(make_request("elsewhere", **TEXT))).finished
    assert finished.reason is FinishReason.LENGTH
    pair.two.fail_with = pair.one.fail_with
    finished = (await pair.generate(make_request("nowhere", **TEXT))).finished
    assert isinstance(finished.error, Overloaded)
    assert finished.error.retry_after_s == 3.0


@pytest.fixture
async def short(tiny_tokenizer: Tokenizer) -> AsyncIterator[TwoServers]:
    """Servers that take 16 tokens at once."""
    one, two = (StandIn(random_loaded(tiny_tokenizer), max_prompt_tokens=16) for _ in range(2))
    async with stand_ins(one, two), running_backend(one, two) as backend:
        yield TwoServers(one, two, backend)


async def test_R3_a_prompt_that_is_longer_than_the_servers_take_is_read_in_pieces(
    pair: TwoServers, short: TwoServers
) -> None:
    """A session whose log is read again has no length that is too long."""
    first, follow_up = await pair.turns()
    end = first.end_state
    requests = [
        dataclasses.replace(make_request("long", **TEXT, logprobs=1), keep_states_at=(5, 16, 33, 40)),
        make_request("counts", **TEXT, repetition_penalty=1.5, generated_counts={7: 2, 30: 1}),
        dataclasses.replace(follow_up, prompt_ids=(*follow_up.prompt_ids, *random_ids(2, 30))),
        dataclasses.replace(make_request("begun", **TEXT), sampled_ids=tuple(first.ids[:4])),
        make_request("just fits", **{**TEXT, "prompt_ids": random_ids(3, 16)}),
    ]
    for request in requests:
        want, got = await pair.generate(request), await short.generate(request)
        assert [type(event) for event in got.events] == [type(event) for event in want.events]
        assert_same(got, want)
    assert end.position > 16
    assert short.backend.stats().tokens_computed == pair.backend.stats().tokens_computed - first.finished.prompt_tokens
    stats = short.backend.upstream_stats()
    assert stats.num_state_hits + stats.num_state_misses == 1  # of turns, not of pieces


async def test_a_server_that_is_lost_between_two_pieces_costs_one_piece(short: TwoServers) -> None:
    request = make_request("long", **TEXT)
    want = await short.generate(request)
    for break_after in (1, 2):
        await eventually(lambda: is_up(short.backend, 2))
        short.one.break_after = short.two.break_after = break_after
        assert_same(await short.generate(dataclasses.replace(request, request_id=f"broken-{break_after}")), want)
    assert short.backend.upstream_stats().num_failovers >= 2


async def test_a_prompt_that_is_scored_must_fit(short: TwoServers) -> None:
    with pytest.raises(InvalidRequest, match="must have at most 16 of them, got 40"):
        short.backend.submit(make_request("long", **TEXT, prompt_logprobs=1))
    fits = make_request("fits", **{**TEXT, "prompt_ids": random_ids(1, 16)}, prompt_logprobs=1)
    assert len((await short.generate(fits)).scored.logprobs) == 16


async def test_a_refusal_of_the_worker_is_not_tried_elsewhere(pair: TwoServers) -> None:
    pair.one.fail_with = pair.two.fail_with = NumericalError("not finite")
    finished = (await pair.generate(make_request(**TEXT))).finished
    assert (finished.reason, str(finished.error)) == (FinishReason.ERROR, "not finite")
    assert len(pair.one.options) + len(pair.two.options) == 1


async def test_a_deadline_goes_with_the_request(pair: TwoServers) -> None:
    deadline = time.monotonic() + 1.0
    finished = (await pair.generate(make_request(**{**TEXT, "max_tokens": 100_000}, deadline=deadline))).finished
    assert isinstance(finished.error, DeadlineExceeded)
    assert 0 < pair.one.options[0]["timeout_s"] <= 1.0


async def test_a_deadline_passes_also_where_the_worker_forgets_it(pair: TwoServers) -> None:
    pair.one.is_mute = True
    finished = (await pair.generate(make_request(**TEXT, deadline=time.monotonic() + 0.5))).finished
    assert isinstance(finished.error, DeadlineExceeded)
    assert (finished.prompt_tokens, finished.completion_tokens) == (len(TEXT["prompt_ids"]), 0)


async def test_S6_a_cancel_reaches_the_worker(pair: TwoServers) -> None:
    generation = pair.backend.submit(make_request(**{**TEXT, "max_tokens": 100_000}))
    events = generation.events()
    await anext(events)
    generation.cancel()
    assert [event async for event in events][-1].reason is FinishReason.ABORT

    async def is_idle() -> bool:
        return pair.one.worker.status().engine.num_running == 0

    await eventually(is_idle)


async def test_a_request_id_is_used_once_at_a_time(pair: TwoServers) -> None:
    pair.backend.submit(make_request("a"))
    with pytest.raises(InvalidRequest, match="in use"):
        pair.backend.submit(make_request("a"))


async def test_a_state_is_inspected_by_whoever_can(pair: TwoServers) -> None:
    await pair.one.stop()
    report = await pair.backend.inspect_state(None)
    assert report.num_bytes == pair.backend.model.state_bytes
    with pytest.raises(SnapshotCorrupt):
        await pair.backend.inspect_state(b"short")
