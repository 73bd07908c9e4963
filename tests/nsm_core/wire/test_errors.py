from __future__ import annotations

import pytest

from nsm_core.errors import (
    DeadlineExceeded,
    EngineDead,
    InvalidRequest,
    NumericalError,
    Overloaded,
    SessionBusy,
    SnapshotCorrupt,
    StateMismatch,
    StepFailed,
)
from nsm_core.wire.errors import Failure, StateMissing, decode_failure, encode_failure, triton_code

ERRORS = [
    (InvalidRequest("top_p must be in (0, 1], got 7", param="top_p"), "INVALID_ARG"),
    (InvalidRequest("odd {text: of the client} {}", code="odd"), "INVALID_ARG"),
    (StateMismatch("made by another model"), "INVALID_ARG"),
    (SnapshotCorrupt("has 3 bytes"), "INVALID_ARG"),
    (StateMissing("no state abc"), "NOT_FOUND"),
    (Overloaded("the queue is full", retry_after_s=2.5), "UNAVAILABLE"),
    (Overloaded("no room for another of these", param="include_routing"), "UNAVAILABLE"),
    (EngineDead("the engine failed"), "UNAVAILABLE"),
    (DeadlineExceeded("the deadline passed after 3 tokens"), "CANCELLED"),
    (NumericalError("not finite"), "INTERNAL"),
    (StepFailed("a step failed"), "INTERNAL"),
]


@pytest.mark.parametrize(("error", "code"), ERRORS, ids=[type(error).__name__ for error, _ in ERRORS])
def test_errors_arrive_as_they_were(error: Exception, code: str) -> None:
    sent = Failure(error=error, prompt_tokens=7, cached_tokens=0, completion_tokens=3)
    line = encode_failure(sent)
    assert "\n" not in line
    arrived = decode_failure(line)
    assert type(arrived.error) is type(error)
    assert str(arrived.error) == str(error)
    assert vars(arrived.error) == vars(error)
    assert (arrived.prompt_tokens, arrived.cached_tokens, arrived.completion_tokens) == (7, 0, 3)
    assert triton_code(error) == code


def test_an_error_is_fit_for_people() -> None:
    line = encode_failure(Failure(error=Overloaded("the queue is full", retry_after_s=1.0)))
    assert line == 'overloaded: the queue is full {"retry_after_s": 1.0}'
    assert encode_failure(Failure(error=StateMissing("gone"))) == "state_missing: gone"


@pytest.mark.parametrize(
    ("error", "message"),
    [(KeyError("secret"), "the worker failed: KeyError"), (SessionBusy("another turn"), "another turn")],
)
def test_what_has_no_code_is_a_dead_engine(error: Exception, message: str) -> None:
    arrived = decode_failure(encode_failure(Failure(error=error))).error
    assert (type(arrived), str(arrived)) == (EngineDead, message)
    assert triton_code(error) == "INTERNAL"


@pytest.mark.parametrize("line", ["Stub process 'nsm_0_0' is not healthy.", "overloaded", "failed: at\nmodel.py", ""])
def test_the_servers_own_words_are_a_dead_engine(line: str) -> None:
    failure = decode_failure(line)
    assert isinstance(failure.error, EngineDead)
    assert str(failure.error).startswith("the worker's server answered")
    assert failure.completion_tokens == 0
