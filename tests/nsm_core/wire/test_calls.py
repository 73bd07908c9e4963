from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsm_core.engine.request import GenerationRequest
from nsm_core.errors import InvalidRequest
from nsm_core.sampling.params import SamplingParams
from nsm_core.state.report import Detail
from nsm_core.wire.call_tensors import decode_call, encode_call
from nsm_core.wire.calls import (
    MAX_TIMEOUT_S,
    Call,
    DescribeCall,
    GenerateCall,
    InspectCall,
    ResumePoint,
    StatusCall,
    call_of,
    request_of,
    state_id,
)
from nsm_core.wire.tensors import Tensors
from tests.nsm_core.wire.wire_values import options, received, requests, texts

RESUME = {"position": 3, "fingerprint": "f", "generated_counts": []}
STATE = np.zeros(3, dtype=np.uint8)


def decode(tensors: Tensors, parameters: dict[str, Any] | None = None) -> Call:
    return decode_call(tensors, parameters or {}, draw_seed=lambda: 77)


def decode_generate(tensors: Tensors, parameters: dict[str, Any] | None = None) -> GenerateCall:
    call = decode(tensors, parameters)
    assert isinstance(call, GenerateCall)
    return call


def text_tensor(text: str = "hello") -> np.ndarray[Any, Any]:
    return np.array([text.encode()], dtype=np.object_)


@given(requests)
def test_a_request_of_the_gateway_arrives_as_it_was(request: GenerationRequest) -> None:
    call = decode_generate(received(encode_call(call_of(request, now=10.0))))
    assert call.prompt_ids is not None
    assert request_of(call, "r", prompt_ids=call.prompt_ids, state=call.state, now=0.0) == request


@given(requests)
def test_without_the_bytes_only_the_id_of_the_state_travels(request: GenerationRequest) -> None:
    call = call_of(request, now=0.0)
    tensors = received(encode_call(call, with_state=False))
    assert "state" not in tensors
    assert decode(tensors) == dataclasses.replace(call, state=None)
    if request.resume is not None and call.resume is not None:
        assert call.resume.state_id == state_id(request.resume.state)


@given(
    st.builds(InspectCall, state=st.none() | st.binary(), detail=st.sampled_from(Detail), layer=st.none() | st.just(2))
)
def test_the_other_calls_arrive_as_they_were(inspect: InspectCall) -> None:
    for call in (inspect, DescribeCall(), StatusCall()):
        assert decode(received(encode_call(call))) == call


@given(texts)
def test_a_text_is_all_that_a_call_needs(text: str) -> None:
    call = decode_generate({"text_input": text_tensor(text)})
    assert call == GenerateCall(text=text, sampling=SamplingParams(seed=77))


def test_options_may_come_as_parameters() -> None:
    parameters = {"max_tokens": 5, "temperature": 0.5, "stop": "x", "stream": True, "id": "a", "triton_enable": True}
    call = decode_generate({"text_input": text_tensor(), **options(top_p=0.25)}, parameters)
    assert call.sampling == SamplingParams(max_tokens=5, temperature=0.5, stop=("x",), top_p=0.25, seed=77)
    assert call.stream


def test_a_seed_and_top_k_may_be_negative_as_over_http() -> None:
    call = decode_generate({"text_input": text_tensor(), **options(seed=-1, top_k=-1)})
    assert (call.sampling.seed, call.sampling.top_k) == (2**64 - 1, 0)


def test_a_deadline_becomes_the_time_that_is_left() -> None:
    request = GenerationRequest(request_id="r", prompt_ids=(1,), sampling=SamplingParams(), deadline=12.5)
    call = decode_generate(encode_call(call_of(request, now=10.0)))
    assert call.timeout_s == 2.5
    assert request_of(call, "r", prompt_ids=(1,), state=None, now=100.0).deadline == 102.5
    assert call_of(dataclasses.replace(request, deadline=math.inf), now=10.0).timeout_s == MAX_TIMEOUT_S
    late = call_of(request, now=20.0).timeout_s
    assert late is not None
    assert 0 < late < 0.01


def test_the_pending_token_is_read_in_front_of_the_prompt() -> None:
    resume = {**RESUME, "pending": 9}
    call = decode_generate({"text_input": text_tensor(), "state": STATE, **options(resume=resume)})
    request = request_of(call, "r", prompt_ids=(1, 2), state=call.state, now=0.0)
    assert request.prompt_ids == (9, 1, 2)
    assert call.resume == ResumePoint(position=3, fingerprint="f", generated_counts={}, pending=9)


BAD_OPTIONS = [
    ({"contract": 2}, "contract"),
    ({"op": "train"}, "op"),
    ({"temperture": 1}, "temperture"),
    ({"": 1}, "options"),
    ({"x" * 10_000: 1}, "x" * 80),
    ({"resume": {**RESUME, "": 1}}, "resume"),
    ({"op": "status", "stream": True}, "stream"),
    ({"op": "inspect", "detail": "atom"}, "detail"),
    ({"op": "inspect", "layer": "1"}, "layer"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_tokens": 5.0}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": 3}, "temperature"),
    ({"top_k": None}, "top_k"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": -1.0}, "top_k"),
    ({"seed": -(2**63) - 1}, "seed"),
    ({"seed": 2**64}, "seed"),
    ({"stop_token_ids": [1] * 1025}, "stop_token_ids"),
    ({"logit_bias": {str(token_id): 1 for token_id in range(1025)}}, "logit_bias"),
    ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
    ({"ignore_eos": 1}, "ignore_eos"),
    ({"stop": 5}, "stop"),
    ({"stop": [5]}, "stop"),
    ({"stop_token_ids": ["5"]}, "stop_token_ids"),
    ({"stop_token_ids": [True]}, "stop_token_ids"),
    ({"logit_bias": [[1, 2]]}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"1": "x"}}, "logit_bias"),
    ({"logprobs": 99}, "logprobs"),
    ({"prompt_logprobs": 1.5}, "prompt_logprobs"),
    ({"timeout_s": 0}, "timeout_s"),
    ({"timeout_s": "1"}, "timeout_s"),
    ({"generated_counts": {"1": 1}}, "generated_counts"),
    ({"generated_counts": [[1, 0]]}, "generated_counts"),
    ({"generated_counts": [[1, 1], [1, 2]]}, "generated_counts"),
    ({"generated_counts": [[1, 2**63]]}, "generated_counts"),
    ({"temperature": 10**400}, "temperature"),
    ({"keep_states_at": 3}, "keep_states_at"),
    ({"keep_states_at": [3]}, "stream"),
    ({"sampled_ids": "12"}, "sampled_ids"),
    ({"shared_prompt": "p"}, "shared_prompt"),
    ({"shared_prompt": {"name": "p"}}, "shared_prompt.num_requests"),
    ({"shared_prompt": {"name": "p", "num_requests": 1}}, "shared_prompt"),
    ({"resume": "s"}, "resume"),
    ({"resume": {**RESUME, "pos": 1}}, "resume.pos"),
    ({"resume": {"position": 3, "fingerprint": "f"}}, "resume.generated_counts"),
    ({"resume": {**RESUME, "position": "3"}}, "resume.position"),
    ({"resume": {**RESUME, "pending": 1.5}}, "resume.pending"),
    ({"resume": {**RESUME, "generated_counts": [[1, 2**63]]}}, "resume.generated_counts"),
    ({"resume": {**RESUME, "state_id": 1}}, "resume.state_id"),
    ({"resume": RESUME}, "state"),
]


@pytest.mark.parametrize(("fields", "param"), BAD_OPTIONS, ids=[str(fields)[:60] for fields, _ in BAD_OPTIONS])
def test_what_is_wrong_with_an_option_is_told_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest, match=r" must be .*, got ") as caught:
        decode({"text_input": text_tensor(), **options(**fields)})
    assert caught.value.param == param
    assert str(caught.value).startswith(f"{param} ")


def test_an_operation_without_options_says_so() -> None:
    with pytest.raises(InvalidRequest, match=r"^max_tokens must be left out, .*, got 5"):
        decode(options(op="status", max_tokens=5))


BAD_TENSORS = [
    ({}, "text_input"),
    ({"text_input": text_tensor(), "input_ids": np.array([1], dtype=np.int32)}, "text_input"),
    ({"text_input": np.array([b"a", b"b"], dtype=np.object_)}, "text_input"),
    ({"text_input": np.array([b"\xff"], dtype=np.object_)}, "text_input"),
    ({"text_input": np.array([7], dtype=np.object_)}, "text_input"),
    ({"input_ids": np.array([1.5])}, "input_ids"),
    ({"text_input": text_tensor(), "state": STATE}, "resume"),
    ({"text_input": text_tensor(), "state": STATE.astype(np.int32), **options(resume=RESUME)}, "state"),
    ({"text_input": text_tensor(), "options": text_tensor("{")}, "options"),
    ({"text_input": text_tensor(), "options": text_tensor("[1]")}, "options"),
    ({"text_input": text_tensor(), "options": text_tensor('{"temperature": NaN}')}, "options"),
    ({"text_input": text_tensor(), "options": text_tensor("[" * 10**5)}, "options"),
    ({"text_input": text_tensor(), "prompt": text_tensor()}, "prompt"),
]


@pytest.mark.parametrize(("tensors", "param"), BAD_TENSORS)
def test_what_is_wrong_with_a_tensor_is_told_by_name(tensors: Tensors, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        decode(tensors)
    assert caught.value.param == param
    assert len(str(caught.value)) < 300


def test_an_option_is_given_once() -> None:
    with pytest.raises(InvalidRequest, match=r"^seed must be given once"):
        decode({"text_input": text_tensor(), **options(seed=1)}, {"seed": 1})
