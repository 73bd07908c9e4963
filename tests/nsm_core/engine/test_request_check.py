"""What may not enter: bad ids, and states of another model or place."""

from __future__ import annotations

import dataclasses

import pytest

from nsm_core.engine.request import GenerationRequest, Resume
from nsm_core.errors import InvalidRequest, NsmError, SnapshotCorrupt, StateMismatch
from nsm_core.state.layout import StateLayout
from nsm_core.tokenizer import Tokenizer
from tests.nsm_core.engine.harness import FINGERPRINT, make_engine, make_request, small_model

SPEC = small_model().state_spec
STATE = SPEC.pack(small_model().initial_state(1))
RESUME = Resume(state=STATE, position=0, fingerprint=FINGERPRINT, generated_counts={3: 1})


def refused(request: GenerationRequest, tokenizer: Tokenizer) -> NsmError:
    engine = make_engine(small_model(), tokenizer)
    with pytest.raises(NsmError) as refusal:
        engine.add(request)
    assert not engine.has_work
    return refusal.value


@pytest.mark.parametrize(
    ("prompt_ids", "message"), [((), "at least 1"), ((5, 512), "got 512"), ((-1, 5), "got -1")], ids=str
)
def test_R10_prompts_are_never_empty_and_hold_known_tokens(
    prompt_ids: tuple[int, ...], message: str, tiny_tokenizer: Tokenizer
) -> None:
    for resume in (None, RESUME):
        error = refused(make_request(prompt_ids=prompt_ids, resume=resume), tiny_tokenizer)
        assert isinstance(error, InvalidRequest)
        assert error.param == "prompt"
        assert message in str(error)


@pytest.mark.parametrize("num_top", [-1, 21])
def test_prompt_logprobs_are_limited(num_top: int, tiny_tokenizer: Tokenizer) -> None:
    error = refused(make_request(prompt_logprobs=num_top), tiny_tokenizer)
    assert isinstance(error, InvalidRequest)
    assert error.param == "prompt_logprobs"


def test_sampling_names_known_tokens_only(tiny_tokenizer: Tokenizer) -> None:
    error = refused(make_request(stop_token_ids=(512,)), tiny_tokenizer)
    assert isinstance(error, InvalidRequest)
    assert error.param == "stop_token_ids"


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"fingerprint": "another"}, StateMismatch, "made by model another"),
        ({"position": 7}, SnapshotCorrupt, "position 0, expected 7"),
        ({"position": -1}, SnapshotCorrupt, "position 0, expected -1"),
        ({"state": STATE[:-1]}, SnapshotCorrupt, "bytes"),
        ({"state": STATE + b"\0"}, SnapshotCorrupt, "bytes"),
        ({"state": b""}, SnapshotCorrupt, "bytes"),
        ({"generated_counts": {512: 1}}, SnapshotCorrupt, "got 512"),
        ({"generated_counts": {3: 2**63}}, SnapshotCorrupt, f"got {2**63} for token 3"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_R2_a_state_of_another_model_or_position_is_refused(
    change: dict[str, object], kind: type[NsmError], message: str, tiny_tokenizer: Tokenizer
) -> None:
    fields = {field.name: getattr(RESUME, field.name) for field in dataclasses.fields(RESUME)}
    error = refused(make_request(resume=Resume(**{**fields, **change})), tiny_tokenizer)
    assert type(error) is kind
    assert message in str(error)


@pytest.mark.parametrize("position", [-1, -(2**63), 2**62 + 1, 2**63 - 1])
def test_R2_a_state_at_a_position_that_no_session_reaches_is_refused(position: int, tiny_tokenizer: Tokenizer) -> None:
    state = small_model().initial_state(1)
    state["position"] += position
    resume = dataclasses.replace(RESUME, state=SPEC.pack(state), position=position)
    error = refused(make_request(resume=resume), tiny_tokenizer)
    assert isinstance(error, SnapshotCorrupt)
    assert f"got {position}" in str(error)


def test_the_position_is_read_where_the_layout_has_it() -> None:
    state = small_model().initial_state(1)
    state["position"] += 123_456_789_012
    assert SPEC.read_position(SPEC.pack(state)) == 123_456_789_012


def test_without_torch_a_state_is_checked_alike() -> None:
    layout = StateLayout(SPEC.layout())
    assert layout.num_bytes == SPEC.num_bytes
    assert layout.read_position(STATE) == SPEC.read_position(STATE)
    with pytest.raises(SnapshotCorrupt, match="bytes"):
        layout.read_position(STATE[1:])


def test_counts_of_a_log_that_is_read_again_name_known_tokens_and_exclude_a_state(tiny_tokenizer: Tokenizer) -> None:
    error = refused(make_request(generated_counts={512: 1}), tiny_tokenizer)
    assert isinstance(error, InvalidRequest)
    assert error.param == "generated_counts"
    error = refused(make_request(generated_counts={3: 1}, resume=RESUME), tiny_tokenizer)
    assert isinstance(error, InvalidRequest)
    assert error.param == "generated_counts"


@pytest.mark.parametrize("count", [-1, 2**53 + 1, 2**63])
def test_counts_that_no_session_can_have_are_refused(count: int, tiny_tokenizer: Tokenizer) -> None:
    error = refused(make_request(generated_counts={3: count}), tiny_tokenizer)
    assert isinstance(error, InvalidRequest)
    assert error.param == "generated_counts"
    assert str(count) in str(error)
