from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsm_core.engine.request import EndState, Finished, FinishReason, PromptScored, PromptState, TokenEvent
from nsm_core.errors import EngineDead
from nsm_core.sampling.params import SamplingParams
from nsm_core.wire.calls import GenerateCall, state_id
from nsm_core.wire.events import EventEncoder
from tests.nsm_core.wire.wire_values import counts, details_of, id_lists, logprobs, received, states, texts, token_ids
from tests.support.event_decoder import EventDecoder

PROMPT = (5, 6, 7)
SAMPLED = (8,)
CALL = GenerateCall(
    prompt_ids=PROMPT, sampling=SamplingParams(), return_state=True, keep_state=True, stream=True, sampled_ids=SAMPLED
)

end_states = st.builds(
    EndState,
    state=states,
    position=st.integers(1, 2**62),
    pending=st.none() | token_ids,
    new_ids=id_lists.map(lambda ids: PROMPT + ids),
    generated_counts=counts,
)
finishes = st.builds(
    Finished,
    reason=st.sampled_from(FinishReason),
    text=texts,
    stop_reason=st.none() | texts | token_ids,
    num_dropped_tokens=st.integers(0, 9),
    tail=st.binary(max_size=4),
    prompt_tokens=st.integers(0, 2**40),
    cached_tokens=st.integers(0, 2**40),
    completion_tokens=st.integers(0, 2**40),
    end_state=st.none() | end_states,
)
prompts_scored = st.builds(PromptScored, logprobs=st.lists(st.none() | logprobs, max_size=3).map(tuple))
prompt_states = st.builds(PromptState, position=st.integers(1, 2**62), state=states)
tokens = st.lists(st.tuples(token_ids, texts, st.none() | logprobs), max_size=4).map(
    lambda items: [
        TokenEvent(index=len(SAMPLED) + number, token_id=token_id, text=text, logprob=logprob)
        for number, (token_id, text, logprob) in enumerate(items, start=1)
    ]
)


def encoder(call: GenerateCall = CALL) -> EventEncoder:
    return EventEncoder(call, fingerprint="f", num_prompt=len(PROMPT))


@given(st.lists(prompts_scored | prompt_states, max_size=2), tokens, finishes, st.booleans())
def test_the_events_of_a_stream_arrive_as_they_were(
    before: list[PromptScored | PromptState], tokens: list[TokenEvent], end: Finished, is_behind: bool
) -> None:
    sender, receiver = encoder(), EventDecoder(CALL)
    have_scores = len({token.logprob is None for token in tokens}) < 2  # all or none, as the engine does it
    groups = [tokens] if is_behind and tokens and have_scores else [[token] for token in tokens]
    answers = [*map(sender.encode, before), *map(sender.encode_tokens, groups), sender.encode(end)]
    arrived = [receiver.decode(received(answer)) for answer in answers]
    assert all(arrived)
    assert [event for events in arrived for event in events] == [*before, *tokens, end]
    assert receiver.num_tokens == len(SAMPLED) + len(tokens)
    assert receiver.cached_state_id == (None if end.end_state is None else state_id(end.end_state.state))


def test_where_a_turn_ended_is_told_for_the_next_one() -> None:
    end = EndState(state=b"s", position=9, pending=None, new_ids=(4, *PROMPT, 8), generated_counts={})
    point = details_of(encoder().encode(Finished(reason=FinishReason.STOP, end_state=end)))["resume"]
    assert point == {
        "position": 9,
        "fingerprint": "f",
        "generated_counts": [],
        "pending": None,
        "state_id": state_id(b"s"),
    }


@given(finishes)
def test_bytes_of_a_state_go_out_only_when_asked_for(end: Finished) -> None:
    keeping = GenerateCall(prompt_ids=PROMPT, sampling=SamplingParams(), keep_state=True)
    tensors = encoder(keeping).encode(end)
    assert "state" not in tensors
    assert ("resume" in details_of(tensors)) == (end.end_state is not None)


@given(st.lists(prompts_scored, max_size=1), tokens, finishes)
def test_one_answer_holds_the_whole_text(before: list[PromptScored], tokens: list[TokenEvent], end: Finished) -> None:
    tensors = received(encoder().encode_whole([*before, *tokens, end]))
    assert tensors["text_output"][0].decode() == "".join(token.text for token in tokens) + end.text
    assert tensors["finish_reason"][0].decode() == end.reason
    assert tensors.get("token_ids", np.array([])).tolist() == [token.token_id for token in tokens]
    details = details_of(tensors)
    assert details["completion_tokens"] == end.completion_tokens
    assert ("prompt_logprobs" in details) == bool(before)
    if any(token.logprob for token in tokens):
        assert len(details["logprobs"]) == len(tokens)


def test_a_whole_answer_needs_an_end() -> None:
    with pytest.raises(ValueError, match="the last event"):
        encoder().encode_whole([TokenEvent(index=1, token_id=1, text="")])


def text(value: str) -> np.ndarray[Any, Any]:
    return np.array([value.encode()], dtype=np.object_)


@pytest.mark.parametrize(
    "tensors",
    [
        {},
        {"text_output": text("a")},
        {"text_output": text("a"), "details": text("{}")},
        {"text_output": text("ab"), "token_ids": np.array([1, 2], dtype=np.int32)},
        {"text_output": text("ab"), "token_ids": np.array([1, 2], dtype=np.int32), "details": text('{"texts":["a"]}')},
        {"text_output": text("a"), "finish_reason": text("bored")},
        {"text_output": text("a"), "finish_reason": text("stop"), "details": text("{}")},
        {"text_output": text("a"), "details": text('{"prompt_position": 3}')},
        {"text_output": text("a"), "details": text('{"prompt_logprobs": [{"token_id": 1}]}')},
        {"text_output": text("a"), "details": text('{"logprobs": []}'), "token_ids": np.array([1], dtype=np.int32)},
        {"text_output": text("a"), "details": text("no JSON")},
    ],
)
def test_an_answer_outside_the_contract_is_the_workers_fault(tensors: dict[str, Any]) -> None:
    with pytest.raises(EngineDead, match="not of contract 1"):
        EventDecoder(CALL).decode(tensors)
