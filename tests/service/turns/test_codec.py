from __future__ import annotations

import dataclasses
import math
import time
import zlib
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsm_core import errors
from nsm_core.engine.request import Finished, FinishReason, TokenLogprob
from nsm_core.errors import NsmError, SnapshotCorrupt
from nsm_core.sampling.params import SamplingParams
from service.state.resume import TurnRequest
from service.stores.sessions.key import SessionKey
from service.turns import codec
from service.turns.codec import (
    PACKED,
    CommitPoint,
    StoredToken,
    TurnResult,
    decode_request,
    decode_result,
    decode_tokens,
    digest_of,
    encode_request,
    encode_result,
    encode_tokens,
)

SAMPLING = SamplingParams(
    max_tokens=9,
    temperature=0.3,
    top_p=0.9,
    seed=2**64 - 1,
    stop=("\U0001f98b", "a\nb"),
    stop_token_ids=(3, 4),
    logit_bias={7: -100.0, 8: 0.5},
    logprobs=2,
)
FINISHED = Finished(reason=FinishReason.LENGTH, prompt_tokens=5, cached_tokens=2, completion_tokens=3)


def request_of(**changes: object) -> TurnRequest:
    fields: dict[str, object] = {
        "request_id": "t1",
        "key": SessionKey("a", "s1"),
        "input_ids": (0, 5, 2**31),
        "is_verbatim": True,
        "sampling": SAMPLING,
        "has_own_seed": True,
        "arrival": time.monotonic(),
        "render_options": {"created": 5, "has_logprobs": True},
    }
    return TurnRequest(**{**fields, **changes})  # type: ignore[arg-type]


def test_a_request_comes_back_as_it_was() -> None:
    request = request_of(
        deadline=time.monotonic() + 100.0, expected_version=4, identity="key:k", digest="d", outlasts_engine=True
    )
    raw = encode_request(request, model_fingerprint="m1")
    again, fingerprint = decode_request(raw, SessionKey("a", "s1"), turn_id="t1")
    assert fingerprint == "m1"
    same = (
        "request_id",
        "key",
        "input_ids",
        "is_verbatim",
        "sampling",
        "has_own_seed",
        "render_options",
        "outlasts_engine",
    )
    assert [getattr(again, name) for name in same] == [getattr(request, name) for name in same]
    assert again.deadline is not None
    assert again.deadline - time.monotonic() == pytest.approx(100.0, abs=60.0)
    assert again.expected_version is None  # the record itself is the proof
    no_deadline = encode_request(request_of(), model_fingerprint="m1")
    assert decode_request(no_deadline, SessionKey("a", "s1"), turn_id="t1")[0].deadline is None


logprobs = st.floats(max_value=0.0, width=32) | st.just(-math.inf)
tokens = st.builds(
    lambda token_id, logprob, top: StoredToken(
        token_id,
        None if logprob is None else TokenLogprob(token_id=token_id, logprob=logprob, top=tuple(top)),
    ),
    st.integers(0, 2**31),
    st.none() | logprobs,
    st.lists(st.tuples(st.integers(0, 2**31), logprobs), max_size=3),
)


@given(st.lists(tokens, max_size=5))
def test_tokens_come_back_as_they_were(given_tokens: list[StoredToken]) -> None:
    assert decode_tokens(encode_tokens(given_tokens)) == given_tokens
    result = TurnResult(
        sampling=SAMPLING,
        render_options={"x": None},
        tokens=given_tokens,
        finished=FINISHED,
        commit_point=CommitPoint(version=3, position=7, num_log_tokens=8),
        rebuilt="missing",
        other_numerics="cpu",
    )
    assert decode_result(encode_result(result)) == result


@pytest.mark.parametrize("kind", NsmError.__subclasses__(), ids=lambda kind: kind.__name__)
def test_why_a_turn_failed_comes_back_in_words(kind: type[NsmError]) -> None:
    error = kind("told so", retry_after_s=1.0) if kind is errors.RateLimited else kind("told so")  # type: ignore[call-arg]
    result = TurnResult(sampling=SAMPLING, render_options={}, tokens=(), finished=FINISHED, error=error)
    again = decode_result(encode_result(result)).error
    assert isinstance(again, NsmError)
    assert str(again) == "told so"
    assert type(again) in (kind, NsmError)


def test_a_digest_depends_on_every_value_and_on_no_order() -> None:
    digest = digest_of({"a": 1, "b": [1, 2]})
    assert digest == digest_of({"b": [1, 2], "a": 1})
    assert len({digest, digest_of({"a": 1, "b": [2, 1]}), digest_of({"a": "1", "b": [1, 2]}), digest_of({"a": 1})}) == 4


@given(st.binary(max_size=200))
def test_bytes_that_are_no_record_are_damage(raw: bytes) -> None:
    for decode in (decode_result, decode_tokens):
        with pytest.raises(SnapshotCorrupt):
            decode(raw)


@pytest.mark.parametrize("change", [lambda raw: raw[:-1], lambda raw: raw + b"x", lambda raw: raw[1:]])
def test_a_record_that_was_cut_is_damage(change: Callable[[bytes], bytes]) -> None:
    result = TurnResult(sampling=SAMPLING, render_options={}, tokens=(), finished=FINISHED)
    with pytest.raises(SnapshotCorrupt):
        decode_result(change(encode_result(result)))


def test_a_usual_turn_is_a_few_hundred_bytes_and_a_long_one_is_not_packed() -> None:
    sampling = SamplingParams(max_tokens=64, seed=2**63)
    few = [StoredToken(token_id) for token_id in range(1000, 1064)]
    options = {"created": 1795972510, "model": "pulse-books-keyed", "has_logprobs": False, "has_energy": False}
    result = TurnResult(sampling=sampling, render_options=options, tokens=few, finished=FINISHED)
    assert len(encode_result(result)) < 300
    many = [StoredToken(token_id) for token_id in range(60_000)]
    raw = encode_result(dataclasses.replace(result, tokens=many))
    assert raw.startswith(b"{")
    assert decode_result(raw).tokens == many
    assert decode_tokens(encode_tokens(many)) == many


def test_a_few_tokens_are_plain_and_many_are_packed() -> None:
    few, many = ([StoredToken(number) for number in range(count)] for count in (3, 300))
    assert encode_tokens(few).startswith(b'"')
    assert len(encode_tokens(few)) < 16
    assert encode_tokens(many).startswith(PACKED)
    assert [decode_tokens(encode_tokens(tokens)) for tokens in (few, many)] == [few, many]


@pytest.mark.parametrize("size", [200, 5_000, 60_000])
def test_packed_records_have_one_format_whatever_memory_the_packer_takes(size: int) -> None:
    value = "".join(map(str, range(size)))[:size]
    raw = codec._JSON.encode(value).encode()
    usual = zlib.compressobj(zdict=codec._USUAL)
    packed = usual.compress(raw) + usual.flush()
    assert codec._load(packed) == value
    assert codec._dump(value)[:2] == packed[:2]
    assert zlib.decompressobj(zdict=codec._USUAL).decompress(codec._dump(value)) == raw
