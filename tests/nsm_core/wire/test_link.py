"""Messages of a link."""

from __future__ import annotations

import pytest

from nsm_core.engine.request import Finished, FinishReason
from nsm_core.errors import EngineDead, InvalidRequest, Overloaded
from nsm_core.grammars.grammar import Grammar
from nsm_core.sampling.params import SamplingParams
from nsm_core.wire.calls import GenerateCall, ResumePoint
from nsm_core.wire.link import (
    Cancel,
    LinkStep,
    Opened,
    Start,
    Taken,
    decode_to_gateway,
    decode_to_worker,
    encode_to_gateway,
    encode_to_worker,
)
from nsm_core.wire.local import Step


def test_what_a_gateway_says_comes_back() -> None:
    grammar = Grammar(kind="regex", source="a+", param="response_format")
    sampling = SamplingParams(
        max_tokens=5,
        seed=2**63,
        logit_bias={3: -1.5},
        stop=("a",),
        grammar=grammar,
    )
    point = ResumePoint(position=7, fingerprint="f", generated_counts={3: 2}, state_id="s")
    call = GenerateCall(prompt_ids=(1, 2), sampling=sampling, resume=point, state=b"\x00\xff", stream=True, timeout_s=2)
    messages = [Start(4, call), Cancel(4), Taken(64)]
    assert decode_to_worker(encode_to_worker(messages)) == messages


def test_what_a_worker_says_comes_back() -> None:
    error = Overloaded("full", retry_after_s=2.0)
    end = Finished(reason=FinishReason.ERROR, error=error)
    step = Step(b"\x01\x00\x00\x00", b"\x05\x00\x00\x00", b"", b"", [], [], [], [], [(1, end)], 3)
    got = decode_to_gateway(encode_to_gateway(LinkStep(step, [(1, "id")], [2])))
    assert isinstance(got, LinkStep)
    assert (got.step.numbers, got.retained, got.missing) == (step.numbers, [(1, "id")], [2])
    came = got.step.ends[0][1].error
    assert isinstance(came, Overloaded)
    assert (str(came), came.retry_after_s) == ("full", 2.0)
    assert isinstance(decode_to_gateway(encode_to_gateway(Opened())), Opened)


@pytest.mark.parametrize("raw", [b"", b"\xc1", b"\x91\x01", encode_to_gateway(Opened())])
def test_other_bytes_are_refused(raw: bytes) -> None:
    with pytest.raises(InvalidRequest, match="messages must be"):
        decode_to_worker(raw)


@pytest.mark.parametrize("raw", [None, b"", b"\xc1", encode_to_worker([Cancel(1)])])
def test_answers_of_another_contract_are_the_servers_fault(raw: bytes | None) -> None:
    with pytest.raises(EngineDead, match="not of contract"):
        decode_to_gateway(raw)
