from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from nsm_core.engine import async_engine
from nsm_core.engine.engine import Engine
from nsm_core.errors import DeadlineExceeded, EngineDead, InvalidRequest, Overloaded
from nsm_core.sampling.params import SamplingParams
from nsm_core.tokenizer import Tokenizer
from nsm_core.tokenizer_files import tokenizer_from_json
from nsm_core.triton import worker as worker_module
from nsm_core.triton.worker import Worker
from nsm_core.wire.call_tensors import decode_resume, encode_call
from nsm_core.wire.calls import Call, DescribeCall, GenerateCall, InspectCall, StatusCall, state_id
from nsm_core.wire.description import decode_description, decode_report, decode_status
from nsm_core.wire.errors import StateMissing
from nsm_core.wire.tensors import Tensors
from tests.nsm_core.engine.harness import FINGERPRINT, small_model
from tests.nsm_core.triton.fake_triton import FakeResponder, make_worker

ENDLESS = 131_072
StartWorker = Callable[..., Worker]


@pytest.fixture
def start(tiny_tokenizer: Tokenizer) -> Iterator[StartWorker]:
    """Started workers, stopped at the end if the test did not."""
    workers: list[Worker] = []

    def start(**config: Any) -> Worker:
        worker = make_worker(tiny_tokenizer, **config)
        worker.start()
        workers.append(worker)
        return worker

    yield start
    for worker in workers:
        if worker.status().is_ready:
            worker.stop()


def generate(max_tokens: int = 6, **fields: Any) -> GenerateCall:
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=3)
    return GenerateCall(**{"prompt_ids": (0, 5, 9), "sampling": sampling, "stream": True, **fields})


def ask(worker: Worker, call: Call | Tensors, *, with_state: bool = True, **parameters: Any) -> FakeResponder:
    """Without waiting."""
    responder = FakeResponder()
    tensors = call if isinstance(call, dict) else encode_call(call, with_state=with_state)  # type: ignore[arg-type]
    worker.accept(tensors, parameters, responder)
    return responder


def error_of(responder: FakeResponder) -> Exception:
    failure = responder.wait().failure
    assert failure is not None
    assert responder.num_last == 1
    return failure.error


def test_a_stream_and_one_answer_say_the_same(start: StartWorker) -> None:
    worker = start()
    streamed = ask(worker, generate()).wait()
    whole = ask(worker, generate(stream=False)).wait()
    assert len(streamed.answers) > 1
    assert len(whole.answers) == 1
    assert streamed.ids == whole.ids
    assert len(whole.ids) == 6
    assert "".join(answer["text_output"][0].decode() for answer in streamed.answers) == whole_text(whole)
    timed = set(streamed.details["timings"])
    assert timed == set(whole.details["timings"]) == {"queue_s", "prefill_s", "decode_s"}
    measured = {"timings": None, "energy": None}
    assert {**streamed.details, **measured} == {**whole.details, **measured}
    assert streamed.num_last == whole.num_last == 1


def whole_text(whole: FakeResponder) -> str:
    text: str = whole.answers[0]["text_output"][0].decode()
    return text


def test_a_fresh_text_begins_with_the_start_token_and_a_resumed_one_does_not(
    start: StartWorker, tiny_tokenizer: Tokenizer
) -> None:
    worker, num_ids = start(), len(tiny_tokenizer.encode("It was"))
    text = {"text_input": np.array([b"It was"], dtype=np.object_)}
    first = ask(worker, text, max_tokens=2, ignore_eos=True, keep_state=True).wait()
    assert first.details["prompt_tokens"] == num_ids + 1
    call = generate(prompt_ids=None, text="It was", resume=decode_resume(first.details["resume"]))
    second = ask(worker, call).wait()
    assert second.details["prompt_tokens"] - second.details["cached_tokens"] == num_ids + 1  # the pending token


def test_a_seed_is_drawn_where_none_is_given(start: StartWorker) -> None:
    worker = start()
    text = {"text_input": np.array([b"x"], dtype=np.object_)}
    runs = [ask(worker, text, max_tokens=20, ignore_eos=True).wait().ids for _ in range(2)]
    assert runs[0] != runs[1]


def test_a_kept_state_is_gone_on_from_without_its_bytes(start: StartWorker) -> None:
    worker = start()
    whole = ask(worker, generate(8)).wait()
    first = ask(worker, generate(3, keep_state=True)).wait()
    assert "state" not in first.answers[-1]
    second = ask(worker, generate(5, prompt_ids=(), resume=decode_resume(first.details["resume"]))).wait()
    assert first.ids + second.ids == whole.ids
    states = worker.status().states
    assert (states.num_states, states.num_hits, states.num_misses) == (1, 1, 0)
    assert states.num_bytes == small_model().state_spec.num_bytes


def test_prompt_states_are_kept_where_the_end_state_is(start: StartWorker) -> None:
    worker = start()
    ask(worker, generate(keep_state=True, keep_states_at=(1, 2))).wait()
    assert worker.status().states.num_states == 3


def test_a_state_that_is_not_kept_is_asked_for_before_any_work(start: StartWorker) -> None:
    worker = start(kept_states_mb=0)
    first = ask(worker, generate(3, return_state=True, keep_state=True)).wait()
    call = generate(resume=decode_resume(first.details["resume"]), state=first.answers[-1]["state"].tobytes())
    steps = worker.status().engine.num_steps
    assert isinstance(error_of(ask(worker, call, with_state=False)), StateMissing)
    assert worker.status().engine.num_steps == steps
    assert len(ask(worker, call).wait().ids) == 6
    assert worker.status().states.num_misses == 1


def test_bytes_under_another_states_name_are_refused(start: StartWorker) -> None:
    worker = start()
    first = ask(worker, generate(3, return_state=True)).wait()
    point = dataclasses.replace(decode_resume(first.details["resume"]), state_id=state_id(b"other"))
    error = error_of(ask(worker, generate(resume=point, state=first.answers[-1]["state"].tobytes())))
    assert isinstance(error, InvalidRequest)
    assert error.param == "resume.state_id"


def test_refusals_leave_the_others_alone(start: StartWorker) -> None:
    worker = start(max_prompt_tokens=4)
    running = ask(worker, generate(60))
    for tensors, param in (
        ({}, "text_input"),
        (encode_call(generate(prompt_ids=(512,))), "input_ids"),
        (encode_call(generate(prompt_ids=(-1,))), "input_ids"),
        (encode_call(generate(prompt_ids=())), "input_ids"),
        (encode_call(generate(generated_counts={512: 1})), "generated_counts"),
        (encode_call(generate(prompt_ids=(1,) * 5)), "input_ids"),
        (encode_call(generate(prompt_ids=None, text="a b c d e")), "text_input"),
        (encode_call(generate(prompt_ids=None, text="x" * 10_000)), "text_input"),
    ):
        error = error_of(ask(worker, tensors))
        assert isinstance(error, InvalidRequest)
        assert error.param == param
    assert len(running.wait().ids) == 60


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"pending": -1}, "resume.pending"),
        ({"pending": 512}, "resume.pending"),
        ({"generated_counts": {512: 1}}, "resume.generated_counts"),
        ({"pending": None}, "input_ids"),
    ],
)
def test_what_is_wrong_with_a_resumed_call_is_told_by_its_own_names(
    start: StartWorker, change: dict[str, Any], param: str
) -> None:
    worker = start()
    first = ask(worker, generate(3, keep_state=True)).wait()
    point = dataclasses.replace(decode_resume(first.details["resume"]), **change)
    error = error_of(ask(worker, generate(prompt_ids=(), resume=point)))
    assert isinstance(error, InvalidRequest)
    assert error.param == param


def test_an_error_in_the_middle_tells_what_was_done(start: StartWorker) -> None:
    for is_stream in (True, False):
        responder = ask(start(), generate(ENDLESS, timeout_s=0.5, stream=is_stream))
        assert isinstance(error_of(responder), DeadlineExceeded)
        assert responder.failure is not None
        assert responder.failure.prompt_tokens == 3
        assert responder.failure.completion_tokens >= len(responder.ids)


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"max_tokens": 131_073}, "max_tokens"), ({"max_tokens": 2**80}, "max_tokens"), ({"timeout_s": 61}, "timeout_s")],
)
def test_T4_a_call_has_an_end_in_tokens_and_in_time(start: StartWorker, fields: dict[str, Any], param: str) -> None:
    worker = start(max_timeout_s=60.0, default_timeout_s=60.0)
    error = error_of(ask(worker, generate(**fields)))
    assert isinstance(error, InvalidRequest)
    assert error.param == param


def test_T4_a_slot_comes_back_from_a_client_that_cannot_be_seen_leaving(start: StartWorker) -> None:
    worker = start(default_timeout_s=0.2)
    unseen = [ask(worker, generate(ENDLESS, stream=False)) for _ in range(2)]
    for responder in unseen:
        assert isinstance(error_of(responder), DeadlineExceeded)
    assert worker.status().engine.num_running == 0


def test_the_queue_is_bounded(start: StartWorker) -> None:
    worker = start()
    running = [ask(worker, generate(ENDLESS)) for _ in range(5)]
    assert isinstance(error_of(ask(worker, generate())), Overloaded)
    leave(worker, running)
    assert len(ask(worker, generate()).wait().ids) == 6


def leave(worker: Worker, responders: Sequence[FakeResponder]) -> None:
    for responder in responders:
        responder.is_left = True
    worker.cancel_abandoned()
    for responder in responders:
        responder.wait()
        assert responder.answers[-1]["finish_reason"].tolist() == [b"abort"]
        assert responder.num_last == 1


def test_T4_a_client_that_left_ends_its_request_alone(start: StartWorker) -> None:
    worker = start()
    gone, stays = ask(worker, generate(ENDLESS)), ask(worker, generate(200))
    gone.has_answers.wait(60)
    leave(worker, [gone])
    assert len(stays.wait().ids) == 200


def test_a_send_that_fails_ends_its_request(start: StartWorker) -> None:
    class Broken(FakeResponder):
        def send(self, tensors: Tensors, *, is_last: bool) -> None:
            raise RuntimeError("no shared memory")

    worker, responder = start(), Broken()
    worker.accept(encode_call(generate(ENDLESS)), {}, responder)
    assert isinstance(error_of(responder), RuntimeError)
    assert len(ask(worker, generate()).wait().ids) == 6
    assert worker.status().engine.num_running == 0


def test_T7_what_runs_may_end_when_the_worker_stops(start: StartWorker) -> None:
    worker = start(drain_s=20.0)
    running = ask(worker, generate(50))
    running.has_answers.wait(60)
    worker.stop()
    assert len(running.ids) == 50
    assert not worker.status().is_ready


def test_T7_what_does_not_end_in_time_is_aborted(start: StartWorker) -> None:
    worker = start(drain_s=0.1)
    running = [ask(worker, generate(ENDLESS)) for _ in range(4)]
    running[0].has_answers.wait(60)
    worker.stop()
    for responder in running:
        assert responder.num_last == 1


def test_T7_a_dead_engine_does_not_hold_up_a_stop(start: StartWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = start(drain_s=3600.0)

    def fail(_: Engine) -> Any:
        raise RuntimeError("broken by the test")

    monkeypatch.setattr(Engine, "step", fail)
    assert isinstance(error_of(ask(worker, generate())), EngineDead)
    worker.stop()


def test_T2_T7_streams_of_a_hung_engine_end_without_it(start: StartWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    worker, is_over, is_hung = start(drain_s=3600.0), threading.Event(), threading.Event()

    def hang(_: Engine) -> Any:
        is_hung.set()
        is_over.wait()
        return []

    monkeypatch.setattr(async_engine, "HEARTBEAT_LIMIT_S", 0.02)
    monkeypatch.setattr(worker_module, "ABORT_S", 0.05)
    monkeypatch.setattr(Engine, "step", hang)
    responder = ask(worker, generate(ENDLESS))
    try:
        assert is_hung.wait(60)
        worker.stop()
        assert "its engine hangs" in str(error_of(responder))
    finally:
        is_over.set()


def test_a_call_that_comes_while_the_worker_stops_is_refused(start: StartWorker) -> None:
    worker = start(drain_s=20.0)
    running = ask(worker, generate(ENDLESS))
    running.has_answers.wait(60)
    stopped = worker.begin_stop()
    assert isinstance(error_of(ask(worker, generate())), EngineDead)
    assert not decode_status(ask(worker, StatusCall()).wait().answers[0]).is_ready
    assert not stopped.done()
    leave(worker, [running])
    worker.stop()
    assert stopped.done()


def test_the_worker_describes_itself(start: StartWorker, tiny_tokenizer: Tokenizer) -> None:
    worker = start()
    description = decode_description(ask(worker, DescribeCall()).wait().answers[0])
    assert (description.model.fingerprint, description.max_slots) == (FINGERPRINT, 2)
    assert tokenizer_from_json(description.tokenizer).fingerprint == tiny_tokenizer.fingerprint
    assert decode_status(ask(worker, StatusCall()).wait().answers[0]).is_ready
    assert decode_report(ask(worker, InspectCall()).wait().answers[0]).position == 0
    assert isinstance(error_of(ask(worker, InspectCall(layer=9))), InvalidRequest)
