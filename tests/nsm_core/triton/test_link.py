"""The worker's side of a link, without Triton."""

from __future__ import annotations

import array
from collections.abc import Callable, Iterator

import pytest

from nsm_core.engine.request import Finished, FinishReason
from nsm_core.errors import EngineDead, InvalidRequest
from nsm_core.sampling.params import SamplingParams
from nsm_core.tokenizer import Tokenizer
from nsm_core.triton import link as link_module
from nsm_core.triton.worker import Worker
from nsm_core.wire.call_tensors import encode_call
from nsm_core.wire.calls import GenerateCall, LinkCall, PostCall, ResumePoint
from nsm_core.wire.link import (
    Cancel,
    LinkStep,
    Opened,
    Start,
    Taken,
    ToWorker,
    decode_to_gateway,
    encode_to_worker,
)
from tests.nsm_core.engine.harness import FINGERPRINT
from tests.nsm_core.triton.fake_triton import FakeResponder, make_worker
from tests.support.triton_servers import wait_until

ENDLESS = 100_000
STREAMED = GenerateCall(
    prompt_ids=(0, 5, 9),
    sampling=SamplingParams(max_tokens=6, ignore_eos=True, seed=3),
    stream=True,
    return_state=True,
    keep_state=True,
)


class Gateway:
    """A gateway's link to a worker."""

    def __init__(self, worker: Worker, name: str = "a") -> None:
        self.responder = FakeResponder()
        self._worker, self._name, self._num_posts = worker, name, 0
        worker.accept(encode_call(LinkCall(name)), {}, self.responder)

    def post(self, *messages: ToWorker, number: int | None = None) -> FakeResponder:
        number = self._num_posts if number is None else number
        self._num_posts += 1
        responder = FakeResponder()
        call = PostCall(self._name, number, encode_to_worker(list(messages)))
        self._worker.accept(encode_call(call), {}, responder)
        return responder

    @property
    def steps(self) -> list[LinkStep]:
        answers = [decode_to_gateway(tensors["messages"].tobytes()) for tensors in list(self.responder.answers)]
        return [answer for answer in answers if isinstance(answer, LinkStep)]

    def ids(self, number: int) -> list[int]:
        pairs = [
            pair
            for step in self.steps
            for pair in zip(array.array("I", step.step.numbers), array.array("I", step.step.ids), strict=True)
        ]
        return [token_id for owner, token_id in pairs if owner == number]

    def end(self, number: int) -> Finished:
        """Waits for it."""
        wait_until(lambda: number in self._ends(), f"the end of request {number}")
        return self._ends()[number]

    def wait_for_tokens(self, number: int) -> None:
        wait_until(lambda: bool(self.ids(number)), f"tokens of request {number}")

    def _ends(self) -> dict[int, Finished]:
        return dict(end for step in self.steps for end in step.step.ends)


@pytest.fixture
def start(tiny_tokenizer: Tokenizer) -> Iterator[Callable[..., Worker]]:
    workers: list[Worker] = []

    def start(**config: object) -> Worker:
        workers.append(make_worker(tiny_tokenizer, **config))
        workers[-1].start()
        return workers[-1]

    yield start
    for worker in workers:
        if worker.status().is_ready:
            worker.stop()


def endless() -> GenerateCall:
    return GenerateCall(
        prompt_ids=(0, 5), sampling=SamplingParams(max_tokens=ENDLESS, ignore_eos=True, seed=1), stream=True
    )


def test_requests_of_two_gateways_are_told_apart(start: Callable[..., Worker]) -> None:
    worker = start(max_slots=4)
    plain = FakeResponder()
    worker.accept(encode_call(STREAMED), {}, plain)
    one, two = Gateway(worker, "a"), Gateway(worker, "b")
    for gateway in (one, two):
        gateway.post(Start(0, STREAMED), Start(1, STREAMED))
    for gateway in (one, two):
        for number in (0, 1):
            end = gateway.end(number)
            assert (end.reason, end.completion_tokens) == (FinishReason.LENGTH, 6)
            assert gateway.ids(number) == plain.wait().ids
    assert worker.calls.outcomes()["length"] == 5
    assert isinstance(decode_to_gateway(one.responder.answers[0]["messages"].tobytes()), Opened)


def test_messages_are_taken_in_the_order_in_which_they_were_said(start: Callable[..., Worker]) -> None:
    gateway = Gateway(start())
    assert gateway.post(Cancel(0), number=1).wait().failure is None
    gateway.post(Start(0, endless()), number=0)
    assert gateway.end(0).reason is FinishReason.ABORT


@pytest.mark.parametrize("number", [0, -1, 5_000])
def test_a_call_of_another_number_is_refused(number: int, start: Callable[..., Worker]) -> None:
    gateway = Gateway(start())
    gateway.post().wait()
    failure = gateway.post(number=number).wait().failure
    assert failure is not None
    assert isinstance(failure.error, InvalidRequest)


def test_other_messages_and_unknown_links_are_refused(start: Callable[..., Worker]) -> None:
    worker = start()
    for call, error in (
        (PostCall("a", 0, b"\xc1"), InvalidRequest),
        (PostCall("nobody", 0, encode_to_worker([])), EngineDead),
    ):
        responder = FakeResponder()
        if call.name == "a":
            Gateway(worker)
        worker.accept(encode_call(call), {}, responder)
        failure = responder.wait().failure
        assert failure is not None
        assert type(failure.error) is error


def test_a_gateway_that_leaves_takes_its_requests_with_it(start: Callable[..., Worker]) -> None:
    worker = start()
    gone, stays = Gateway(worker, "a"), Gateway(worker, "b")
    gone.post(Start(0, endless()))
    stays.post(Start(0, endless()))
    gone.wait_for_tokens(0)
    stays.wait_for_tokens(0)
    gone.responder.is_left = True
    worker.cancel_abandoned()
    wait_until(lambda: worker.status().engine.num_running == 1, "the end of one request")
    stays.post(Cancel(0))
    assert stays.end(0).reason is FinishReason.ABORT


def test_a_gateway_that_is_behind_gets_fewer_and_longer_answers(
    start: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_module, "WINDOW", 4)
    monkeypatch.setattr(link_module, "FULL_S", 60.0)
    worker = start()
    gateway = Gateway(worker)
    gateway.post(Start(0, endless()))
    wait_until(lambda: len(gateway.responder.answers) == 4, "a full window")
    num_steps = worker.status().engine.num_steps
    wait_until(lambda: worker.status().engine.num_steps > num_steps + 30, "further steps")
    assert len(gateway.responder.answers) == 4
    gateway.post(Taken(4))
    wait_until(lambda: len(gateway.ids(0)) > 20, "the tokens that were gathered")
    gateway.post(Cancel(0))
    wait_until(lambda: worker.status().engine.num_running == 0, "the end of the request")
    gateway.post(Taken(ENDLESS))
    assert gateway.end(0).completion_tokens == len(gateway.ids(0))


def test_a_word_that_was_lost_does_not_hold_up_the_answers(
    start: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_module, "WINDOW", 2)
    monkeypatch.setattr(link_module, "FULL_S", 0.01)
    gateway = Gateway(start())
    gateway.post(Start(0, STREAMED))
    assert gateway.end(0).completion_tokens == 6


def test_a_state_is_asked_for_where_it_is_missing_and_found_where_it_was_kept(start: Callable[..., Worker]) -> None:
    gateway = Gateway(start())
    gateway.post(Start(0, STREAMED))
    state = gateway.end(0).end_state
    assert state is not None
    ((_, state_id),) = [pair for step in gateway.steps for pair in step.retained]

    def resumed(name: str) -> GenerateCall:
        point = ResumePoint(position=state.position, fingerprint=FINGERPRINT, generated_counts={}, state_id=name)
        return GenerateCall(prompt_ids=(3,), sampling=STREAMED.sampling, stream=True, resume=point)

    gateway.post(Start(1, resumed("another")), Start(2, resumed(state_id)))
    assert gateway.end(2).cached_tokens == state.position
    assert [number for step in gateway.steps for number in step.missing] == [1]


def test_T7_a_worker_that_stops_lets_requests_end_and_then_its_links(start: Callable[..., Worker]) -> None:
    worker = start(drain_s=30.0)
    gateway, idle = Gateway(worker, "a"), Gateway(worker, "b")
    gateway.post(Start(0, STREAMED), Start(1, STREAMED))
    gateway.wait_for_tokens(0)
    worker.begin_stop().result(timeout=60)
    assert [gateway.end(number).reason for number in (0, 1)] == [FinishReason.LENGTH] * 2
    for one in (gateway, idle):
        failure = one.responder.wait().failure
        assert failure is not None
        assert isinstance(failure.error, EngineDead)
    late = Gateway(worker, "c")
    failure = late.responder.wait().failure
    assert failure is not None
    assert "stopping" in str(failure.error)
    worker.stop()


def test_a_request_that_cannot_be_is_told_and_hurts_no_other(start: Callable[..., Worker]) -> None:
    gateway = Gateway(start(max_prompt_tokens=4))
    long = GenerateCall(prompt_ids=(1,) * 5, sampling=STREAMED.sampling, stream=True)
    gateway.post(Start(0, long), Start(1, STREAMED))
    assert isinstance(gateway.end(0).error, InvalidRequest)
    assert gateway.end(1).reason is FinishReason.LENGTH
