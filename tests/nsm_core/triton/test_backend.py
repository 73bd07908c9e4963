from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from nsm_core.sampling.params import SamplingParams
from nsm_core.tokenizer import Tokenizer
from nsm_core.triton import backend as backend_module
from nsm_core.triton.backend import Backend, device_of
from nsm_core.triton.config import WorkerConfig
from nsm_core.triton.metrics import COUNTERS, GAUGES
from nsm_core.triton.stop_signal import STOP_SIGNAL, StopSignal
from nsm_core.wire.call_tensors import encode_call
from nsm_core.wire.calls import GenerateCall
from tests.nsm_core.triton.fake_triton import WAIT_S, FakeRequest, FakeTriton, make_worker

ENDLESS = 10_000_000
CPU = {"model_instance_kind": "CPU", "model_instance_device_id": "0"}


@pytest.fixture
def triton() -> FakeTriton:
    return FakeTriton()


@pytest.fixture
def backend(triton: FakeTriton, tiny_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Backend]:
    monkeypatch.setattr(backend_module, "WATCH_S", 0.005)
    monkeypatch.setattr(backend_module, "PUBLISH_TURNS", 1)
    backend = Backend(make_worker(tiny_tokenizer), triton, labels={"model": "nsm"})
    yield backend
    backend.close()


def generate(max_tokens: int = 6, **fields: Any) -> FakeRequest:
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return FakeRequest(encode_call(GenerateCall(prompt_ids=(0, 5), sampling=sampling, stream=True, **fields)))


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
    assert set(triton.metrics) == {*GAUGES, *COUNTERS}
    assert triton.metrics["nsm_worker_kept_states"].value == 1
    assert triton.metrics["nsm_worker_slots"].num_writes == 1


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


def test_T7_the_stop_signal_begins_the_end(
    triton: FakeTriton, tiny_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend_module, "WATCH_S", 0.005)
    handler, wakeup_fd = signal.getsignal(STOP_SIGNAL), signal.set_wakeup_fd(-1)
    try:
        stop_signal = StopSignal()
        assert not stop_signal.has_come()
        backend = Backend(make_worker(tiny_tokenizer), triton, labels={"model": "nsm"}, stop_signal=stop_signal)
        request = generate(ENDLESS)
        backend.execute([request])
        assert request.sender.has_responses.wait(WAIT_S)
        os.kill(os.getpid(), STOP_SIGNAL)
        wait(request)
        backend.close()
    finally:
        signal.set_wakeup_fd(wakeup_fd)
        signal.signal(STOP_SIGNAL, handler)


@pytest.mark.parametrize(
    ("wanted", "has_gpu", "kind", "device"),
    [
        ("auto", False, "CPU", "cpu"),
        ("auto", True, "CPU", "cuda:0"),
        ("auto", True, "GPU", "cuda:3"),
        ("cpu", True, "GPU", "cpu"),
        ("cuda", True, "GPU", "cuda:3"),
    ],
)
def test_the_device(wanted: str, has_gpu: bool, kind: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: has_gpu)
    args = {"model_instance_kind": kind, "model_instance_device_id": "3"}
    assert device_of(WorkerConfig(device=wanted), args) == device
