from __future__ import annotations

import pytest

from nsm_core.errors import LogCorrupt, SnapshotCorrupt, StoreUnavailable
from service.stores.sessions.base import LogMark
from service.stores.sessions.key import SessionKey
from service.stores.sessions.redis_fields import decode_head, decode_mark, encode_mark


@pytest.mark.parametrize("answer", [None, b"OK", 7, True, [b"ok"]])
def test_D1_an_answer_to_another_call_is_never_taken_for_a_head(answer: object) -> None:
    with pytest.raises(StoreUnavailable, match="unexpected answer"):
        decode_head(answer, SessionKey("a", "s"))


@pytest.mark.parametrize("answer", [[b"version", b"1"], [1, 2], {b"version": b"x"}])
def test_a_head_with_parts_missing_is_damaged(answer: object) -> None:
    with pytest.raises(SnapshotCorrupt, match="head of session 's' is damaged"):
        decode_head(answer, SessionKey("a", "s"))


@pytest.mark.parametrize("answer", [[], {}])
def test_nothing_is_no_session(answer: object) -> None:
    assert decode_head(answer, SessionKey("a", "s")) is None


@pytest.mark.parametrize("seed", [None, 0, 2**64 - 1])
def test_marks_survive(seed: int | None) -> None:
    mark = LogMark(version=3, num_log_tokens=70_000, num_sampled=2, seed=seed)
    assert decode_mark(encode_mark(mark).encode()) == mark


@pytest.mark.parametrize("raw", [b"2:5:3: 7", b"2:5:3:7 ", b"2:5:+3:7", b"02:5:3:7", b"2:5:3:\xd9\xa7"])
def test_X6_a_mark_that_only_reads_like_one_is_damaged(raw: bytes) -> None:
    with pytest.raises(LogCorrupt):
        decode_mark(raw)
