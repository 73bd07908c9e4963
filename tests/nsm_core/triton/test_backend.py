from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from nsm_core.engine.async_engine import GenerationHandle
from nsm_core.engine.engine import Engine
from nsm_core.errors import ConfigError
from nsm_core.sampling.params import SamplingParams
from nsm_core.tokenizer import Tokenizer
from nsm_core.triton import backend as backend_module
from nsm_core.triton.backend import Backend, device_of
from nsm_core.triton.call_stats import Histogram
from nsm_core.triton.config import WorkerConfig
from nsm_core.triton.metrics import COUNTERS, GAUGES, HISTOGRAMS
from nsm_core.triton.stop_signal import STOP_SIGNAL, StopSignal
from nsm_core.wire.call_tensors import encode_call
from nsm_core.wire.calls import GenerateCall
from nsm_core.wire.tensors import Tensors
from tests.nsm_core.triton.fake_triton import WAIT_S, FakeRequest, FakeResponder, FakeTriton, make_worker

ENDLESS = 131_072
CPU = {"model_instance_kind": "CPU", "model_instance_device_id": "0"}


@pytest.fixture
def triton() -> FakeTriton:
    return FakeTriton()


@pytest.fixture
def backend(triton: FakeTriton, tiny_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Backend]:
    monkeypatch.setattr(backend_module, "WATCH_S", 0.005)
    monkeypatch.setattr(backend_module, "PUBLISH_S", 0.0)
    backend = Backend(make_worker(tiny_tokenizer), triton, labels={"model": "nsm"})
    yield backend
    backend.close()


def generate_tensors(max_tokens: int = 6, **fields: Any) -> Tensors:
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return encode_call(GenerateCall(prompt_ids=(0, 5), sampling=sampling, stream=True, **fields))


def generate(max_tokens: int = 6, **fields: Any) -> FakeRequest:
    return FakeRequest(generate_tensors(max_tokens, **fields))


class StepByStep:
    """From now on, engines make the steps that they are told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._permits = threading.Semaphore(0)
        step = Engine.step

        def permitted(engine: Engine) -> Any:
            if engine.has_work:
                assert self._permits.acquire(timeout=WAIT_S)
            return step(engine)

        monkeypatch.setattr(Engine, "step", permitted)

    def make(self, number: int) -> None:
        self._permits.release(number)


def details_of(request: FakeRequest) -> dict[str, Any]:
    (text,) = [tensor.array[0] for tensor in request.sender.responses[-1].output_tensors if tensor.label == "details"]
    details: dict[str, Any] = json.loads(text)
    return details


def wait(*requests: FakeRequest) -> None:
    for request in requests:
        assert request.sender.is_over.wait(WAIT_S)
        assert request.sender.num_finals == 1


def test_every_request_gets_one_last_answer(backend: Backend) -> None:
    bad = FakeRequest({"text_input": np.array([b"\xff"], dtype=np.object_)})
    by_parameters = FakeRequest({"text_input": np.array([b"x"], dtype=np.object_)}, {"max_tokens": 3})
    streamed = generate()
    backend.execute([bad, by_parameters, streamed])
    wait(bad, by_parameters, streamed)
    (refusal,) = bad.sender.responses
    assert refusal.error is not None
    assert refusal.error.code == FakeTriton.TritonError.INVALID_ARG
    assert refusal.error.message.startswith("invalid_request: text_input must be valid UTF-8")
    assert len(by_parameters.sender.responses) == 1
    assert len(streamed.sender.responses) > 1


def test_a_request_that_cannot_be_read_hurts_no_other(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    unreadable, other = generate(), generate()
    monkeypatch.setattr(unreadable, "inputs", lambda: 1 / 0)
    backend.execute([unreadable, other])
    wait(unreadable, other)
    (answer,) = unreadable.sender.responses
    assert answer.error is not None
    assert answer.error.message == "engine_dead: the worker failed: ZeroDivisionError"
    assert len(other.sender.responses) > 1


def test_tensors_are_copied_before_triton_takes_them_back(backend: Backend) -> None:
    tensors = encode_call(GenerateCall(prompt_ids=(1, 2), sampling=SamplingParams(max_tokens=2)))
    tensors["input_ids"] = tensors["input_ids"].copy()
    request = FakeRequest(tensors)
    backend.execute([request])
    tensors["input_ids"][:] = -1
    wait(request)
    assert request.sender.responses[0].error is None


def test_only_outputs_that_were_asked_for_are_sent(backend: Backend) -> None:
    request = FakeRequest({"input_ids": np.array([1], dtype=np.int32)}, {"max_tokens": 2}, {"token_ids"})
    backend.execute([request])
    wait(request)
    assert [tensor.label for tensor in request.sender.responses[0].output_tensors] == ["token_ids"]


def test_T4_cancel_is_seen(backend: Backend) -> None:
    request = generate(ENDLESS)
    backend.execute([request])
    assert request.sender.has_responses.wait(WAIT_S)
    request.sender.is_left = True
    wait(request)
    names = [tensor.label for tensor in request.sender.responses[-1].output_tensors]
    assert "finish_reason" in names


def test_T4_a_cancel_is_looked_for_after_each_step(
    triton: FakeTriton, tiny_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock never brings it here: it takes the end of the step that runs, and no more than one further."""
    steps, cancelled, cancel = StepByStep(monkeypatch), threading.Event(), GenerationHandle.cancel

    def cancel_and_count(handle: GenerationHandle) -> None:
        cancel(handle)
        cancelled.set()

    monkeypatch.setattr(GenerationHandle, "cancel", cancel_and_count)
    monkeypatch.setattr(backend_module, "WATCH_S", 60.0)
    backend = Backend(make_worker(tiny_tokenizer), triton, labels={"model": "nsm"})
    leaves, stays = generate(ENDLESS), generate(12)
    backend.execute([leaves, stays])
    for num_tokens in range(1, 4):
        steps.make(1)
        leaves.sender.wait_for(num_tokens)
    leaves.sender.is_left = True
    steps.make(1)
    assert cancelled.wait(WAIT_S)
    steps.make(20)
    wait(leaves, stays)
    assert details_of(leaves)["completion_tokens"] <= 5
    assert details_of(stays)["completion_tokens"] == 12
    backend._is_closing.set()
    backend.close()


def test_only_the_batch_is_asked_after_each_step(tiny_tokenizer: Tokenizer) -> None:
    worker = make_worker(tiny_tokenizer)
    worker.start()
    requests = [FakeResponder() for _ in range(4)]
    for responder in requests:
        worker.accept(generate_tensors(ENDLESS), {}, responder)
    for responder in requests[:2]:
        assert responder.has_answers.wait(WAIT_S)
    for responder in requests:
        responder.is_left = True
    worker.cancel_abandoned(is_batch_only=True)
    assert [responder.num_asked for responder in requests] == [1, 1, 0, 0]
    worker.cancel_abandoned()
    for responder in requests:
        responder.wait()
    worker.stop()


def test_asking_takes_a_tenth_of_the_time_at_most(
    triton: FakeTriton, tiny_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of a millisecond, and questions that take longer than they."""
    request, steps = generate(300), StepByStep(monkeypatch)
    ask_s, began = 0.004, time.monotonic()
    asked = threading.Semaphore(0)
    num_asked = 0

    def ask() -> bool:
        nonlocal num_asked
        num_asked += 1
        time.sleep(ask_s)
        asked.release()
        return False

    monkeypatch.setattr(request.sender, "is_cancelled", ask)
    backend = Backend(make_worker(tiny_tokenizer), triton, labels={"model": "nsm"})
    backend.execute([request])
    steps.make(1)
    assert asked.acquire(timeout=WAIT_S)  # the request has not ended
    steps.make(400)
    wait(request)
    assert 1 <= num_asked <= 1 + (time.monotonic() - began) / (10 * ask_s)
    backend.close()


def test_a_last_answer_that_fails_on_its_way_is_not_sent_again(backend: Backend) -> None:
    request = FakeRequest({"input_ids": np.array([1], dtype=np.int32)}, {"max_tokens": 2})
    request.sender.error = RuntimeError("no shared memory")
    other = generate()
    backend.execute([request, other])
    wait(other)
    assert request.sender.responses == []


def test_figures_are_published(backend: Backend, triton: FakeTriton) -> None:
    request = generate(keep_state=True)
    backend.execute([request])
    wait(request)
    assert triton.metrics["nsm_worker_kept_states"].is_written.wait(WAIT_S)
    assert triton.metrics["nsm_worker_steps_total"].is_written.wait(WAIT_S)
    assert {*GAUGES, *COUNTERS} <= set(triton.metrics)
    assert triton.metrics["nsm_worker_kept_states"].value == 1
    assert triton.metrics["nsm_worker_slots"].num_writes == 1


def test_X22_calls_are_counted_by_their_end_and_timed(backend: Backend, triton: FakeTriton) -> None:
    """Triton's own nv_inference_request_success counts a refusal as a success."""
    ids = {"input_ids": np.array([0, 5], dtype=np.int32)}
    good = generate(max_tokens=4)
    whole, bad = FakeRequest(ids, {"max_tokens": 3, "ignore_eos": True}), FakeRequest(ids, {"max_tokens": -1})
    backend.execute([good, whole, bad])
    for request in (good, whole, bad):
        wait(request)
    wanted = {"nsm_worker_calls_total length": 2, "nsm_worker_calls_total invalid_request": 1}
    wanted |= {"nsm_worker_call_seconds_count": 2, "nsm_worker_time_to_first_token_seconds_count": 1}
    wanted |= {"nsm_worker_inter_token_latency_seconds_count": 3}
    for name, value in wanted.items():
        assert triton.metrics[name].reaches(value), name
    for name in HISTOGRAMS:
        buckets = [metric.value for key, metric in triton.metrics.items() if key.startswith(f"{name}_bucket")]
        assert buckets == sorted(buckets)
        assert buckets[-1] == triton.metrics[f"{name}_count"].value
    assert triton.metrics["nsm_worker_call_seconds_sum"].value > 0
    assert "nsm_worker_calls_total overloaded" in triton.metrics  # before the first


def test_X22_a_histogram_counts_as_prometheus_does() -> None:
    histogram = Histogram((0.1, 1.0))
    for value in (0.1, 0.11, 5.0):
        histogram.observe(value)
    histogram.observe(0.5, times=2)
    assert list(histogram.cumulative()) == [("0.1", 1), ("1.0", 4), ("+Inf", 5)]
    assert histogram.total == pytest.approx(6.21)


def test_a_worker_does_not_outlive_its_server(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    ended, statuses = threading.Event(), []

    def end(status: int) -> None:
        statuses.append(status)
        ended.set()
        backend._is_closing.set()

    monkeypatch.setattr(os, "_exit", end)
    monkeypatch.setattr(os, "getppid", lambda: 1)
    assert ended.wait(WAIT_S)
    assert set(statuses) == {backend_module.EXIT_ORPHANED}


@pytest.fixture
def stop_signal() -> Iterator[StopSignal]:
    handler, wakeup_fd = signal.getsignal(STOP_SIGNAL), signal.set_wakeup_fd(-1)
    yield StopSignal()
    signal.set_wakeup_fd(wakeup_fd)
    signal.signal(STOP_SIGNAL, handler)


def test_T7_the_stop_signal_begins_the_end(
    triton: FakeTriton, tiny_tokenizer: Tokenizer, stop_signal: StopSignal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend_module, "WATCH_S", 0.005)
    assert not stop_signal.has_come()
    backend = Backend(make_worker(tiny_tokenizer), triton, labels={"model": "nsm"}, stop_signal=stop_signal)
    request = generate(ENDLESS)
    backend.execute([request])
    assert request.sender.has_responses.wait(WAIT_S)
    os.kill(os.getpid(), STOP_SIGNAL)
    wait(request)
    backend.close()


def test_T7_a_worker_ends_itself_where_its_server_does_not_let_it_go(
    triton: FakeTriton, tiny_tokenizer: Tokenizer, stop_signal: StopSignal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton waits for a last answer that was lost, and does not call `finalize`."""
    monkeypatch.setattr(backend_module, "WATCH_S", 0.005)
    monkeypatch.setattr(backend_module, "LET_GO_S", 0.01)
    ended, statuses = threading.Event(), []
    monkeypatch.setattr(os, "_exit", lambda status: (statuses.append(status), ended.set()))
    backend = Backend(make_worker(tiny_tokenizer), triton, labels={"model": "nsm"}, stop_signal=stop_signal)
    os.kill(os.getpid(), STOP_SIGNAL)
    assert ended.wait(WAIT_S)
    assert set(statuses) == {backend_module.EXIT_STUCK}
    backend.close()


def test_T7_a_worker_that_its_server_lets_go_has_its_time_to_end(
    triton: FakeTriton, tiny_tokenizer: Tokenizer, stop_signal: StopSignal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit for Triton's call of `finalize` ends with this call, however long the end takes."""
    monkeypatch.setattr(backend_module, "WATCH_S", 0.005)
    statuses: list[int] = []
    monkeypatch.setattr(os, "_exit", statuses.append)
    worker = make_worker(tiny_tokenizer)
    backend = Backend(worker, triton, labels={"model": "nsm"}, stop_signal=stop_signal)
    rounds, server, stop, elapsed_s = threading.Semaphore(0), os.getppid(), worker.stop, [0.0]

    def some_rounds() -> None:
        monkeypatch.setattr(os, "getppid", lambda: (rounds.release(), server)[1])  # asked in each
        for _ in range(5):
            assert rounds.acquire(timeout=WAIT_S)

    def slow_stop() -> None:
        elapsed_s[0] = backend_module.LET_GO_S + 1
        some_rounds()
        stop()

    monotonic = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: monotonic() + elapsed_s[0])
    monkeypatch.setattr(worker, "stop", slow_stop)
    os.kill(os.getpid(), STOP_SIGNAL)
    worker.begin_stop().result()
    some_rounds()
    backend.close()
    assert statuses == []


@pytest.mark.parametrize(
    ("wanted", "has_gpu", "kind", "device"),
    [
        ("auto", False, "CPU", "auto"),
        ("auto", True, "CPU", "auto"),
        ("cuda", True, "CPU", "cuda"),
        ("cuda:1", True, "GPU", "cuda:1"),
        ("auto", True, "GPU", "cuda:3"),
        ("cpu", True, "GPU", "cpu"),
        ("cpu", False, "GPU", "cpu"),
        ("cuda", True, "GPU", "cuda:3"),
    ],
)
def test_the_device(wanted: str, has_gpu: bool, kind: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: has_gpu)
    args = {"model_instance_kind": kind, "model_instance_device_id": "3"}
    assert device_of(WorkerConfig(device=wanted), args) == device


@pytest.mark.parametrize(("wanted", "kind"), [("cuda", "CPU"), ("cuda", "GPU"), ("auto", "GPU")])
def test_X19_an_instance_on_a_gpu_that_torch_cannot_use_is_refused(
    wanted: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the CPU it would serve many times slower, and only an INFO line would say so."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    args = {"model_instance_kind": kind, "model_instance_device_id": "0"}
    with pytest.raises(ConfigError, match=f"parameter device is '{wanted}', the instance is of kind {kind}, and torch"):
        device_of(WorkerConfig(device=wanted), args)
