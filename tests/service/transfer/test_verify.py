from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from nsm_core.errors import EngineDead
from nsm_core.state.quantize import StateFormat
from nsm_core.state.snapshot import SamplerState, TensorLayout
from nsm_core.tokenizer import BpeTokenizer
from service.stores.sessions.base import LogMark
from service.stores.sessions.key import SessionKey
from service.stores.sessions.sqlite import SqliteSessionStore
from service.transfer.backup import all_sessions
from service.transfer.verify import Verified, compare_states, verify
from tests.support.committed_sessions import SEED, commit_turns
from tests.support.fakes import FakeBackend, state_after
from tests.support.stored_rows import damage_snapshot
from tests.support.stored_sessions import acquire, create

NAME = SessionKey("a", "s1")


class FaultyStore(SqliteSessionStore):
    """Answers with other marks than it was given."""

    marks: tuple[LogMark, ...] = ()

    async def log_marks(self, key: SessionKey) -> tuple[LogMark, ...]:
        return self.marks


async def verify_one(store: SqliteSessionStore, backend: FakeBackend) -> Verified:
    (verified,) = [found async for found in verify(store, backend, [NAME])]
    return verified


async def test_a_state_that_is_its_logs_is_the_same() -> None:
    store, backend = SqliteSessionStore(None), FakeBackend()
    before = await commit_turns(store, backend)
    verified = await verify_one(store, backend)
    assert (verified.verdict, verified.difference, verified.num_log_tokens) == ("same", 0.0, 15)
    assert (verified.divergences, verified.numerics, verified.damage) == ((), None, None)
    assert await store.get(SessionKey("a", "s1")) == before
    assert await acquire(store)  # no lease was taken


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"state": state_after(tuple(range(14)))}, "digest"),
        ({"sampler": SamplerState(seed=SEED, generated_counts={4: 3})}, "penalty_counts"),
        ({"sampler": SamplerState(seed=8, generated_counts={4: 1, 5: 2, 6: 2, 7: 1})}, "seed"),
        ({"pending_id": 99}, "pending_token"),
        ({"pending_id": None}, "log_length"),
        ({"position": 13}, "position"),
        ({"position": 15}, "log_length"),  # its pending token would be behind the log
        ({"version": 4}, "version"),
        ({"session_id": "s2"}, "session_id"),
        ({"tenant": "b"}, "tenant"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_R2_what_is_not_the_logs_is_told(changes: dict[str, Any], what: str) -> None:
    store, backend = SqliteSessionStore(None), FakeBackend()
    await commit_turns(store, backend, changes=changes)
    verified = await verify_one(store, backend)
    assert verified.verdict == "diverged"
    assert what in [found.what for found in verified.divergences]
    if what == "digest":
        (found,) = verified.divergences
        assert found.difference is not None
        assert found.difference > 1e-3
        assert found.detail == f"differs by {found.difference:.3g}"
    assert not any(word in found.detail for found in verified.divergences for word in ("s2", "b'"))


async def test_marks_that_do_not_fit_are_told() -> None:
    store, backend = FaultyStore(None), FakeBackend()
    await commit_turns(store, backend, turns=2)
    store.marks = (LogMark(version=1, num_log_tokens=5, num_sampled=2, seed=SEED),)
    verified = await verify_one(store, backend)
    assert verified.verdict == "damaged"
    assert "it ends at (1, 5), the head at (2, 10)" in str(verified.damage)
    store.marks = (
        LogMark(version=1, num_log_tokens=9, num_sampled=2, seed=SEED),
        LogMark(version=2, num_log_tokens=10, num_sampled=2, seed=SEED),
    )
    assert "marks" in [found.what for found in (await verify_one(store, backend)).divergences]


async def test_sessions_of_other_models_are_told_apart() -> None:
    store, other = SqliteSessionStore(None), FakeBackend(fingerprint="other")
    stranger = FakeBackend(tokenizer=BpeTokenizer.train(["Hello there"], vocab_size=280), fingerprint="stranger")
    await commit_turns(store, FakeBackend(), "s1")
    await commit_turns(store, stranger, "s2")
    await create(store, "s3")
    names = [*await all_sessions(store), SessionKey("a", "s4")]
    verdicts = {found.name.session_id: found.verdict async for found in verify(store, other, names)}
    assert verdicts == {"s1": "other_model", "s2": "other_tokenizer", "s3": "empty", "s4": "gone"}


async def test_another_numerics_class_is_named() -> None:
    store, backend = SqliteSessionStore(None), FakeBackend()
    await commit_turns(store, backend, changes={"numerics": "cuda/bf16"})
    assert (await verify_one(store, backend)).numerics == "cuda/bf16"


async def test_numerics_classes_that_began_a_session_are_named() -> None:
    store, backend = SqliteSessionStore(None), FakeBackend()
    await commit_turns(store, backend, changes={"earlier_numerics": ("cpu/int4",)})
    verified = await verify_one(store, backend)
    assert (verified.numerics, verified.earlier_numerics) == (None, ("cpu/int4",))


async def test_R3_what_cannot_be_read_is_damaged_and_the_rest_goes_on() -> None:
    store, backend = SqliteSessionStore(None), FakeBackend()
    await commit_turns(store, backend, "s1")
    await commit_turns(store, backend, "s2")
    await damage_snapshot(store, tenant="a")
    found = [found async for found in verify(store, backend, await all_sessions(store))]
    assert [one.verdict for one in found] == ["damaged", "same"]
    assert "checksum" in str(found[0].damage)


async def test_an_engine_that_fails_ends_it() -> None:
    store, backend = SqliteSessionStore(None), FakeBackend(fail_after=0, error=EngineDead("gone"))
    await commit_turns(store, backend)
    with pytest.raises(EngineDead):
        await verify_one(store, backend)


def test_differences_are_relative_for_large_numbers_and_absolute_for_small_ones() -> None:
    layout = (TensorLayout("a", (2,), "float32"), TensorLayout("n", (), "int64"))
    derived = np.array([100.0, 0.0], "<f4").tobytes() + (5).to_bytes(8, "little")
    stored = np.array([101.0, 0.5], "<f4").tobytes() + (5).to_bytes(8, "little")
    assert compare_states(layout, stored, derived) == {"a": 0.5, "n": 0.0}
    stored = np.array([101.0, 0.0], "<f4").tobytes() + (5).to_bytes(8, "little")
    assert compare_states(layout, stored, derived) == {"a": pytest.approx(0.01), "n": 0.0}
    stored = np.array([np.nan, 0.0], "<f4").tobytes() + (5).to_bytes(8, "little")
    assert compare_states(layout, stored, derived) == {"a": float("inf"), "n": 0.0}


def test_of_a_rounded_state_each_tensor_is_compared_as_a_whole_and_counts_have_to_be_equal() -> None:
    layout = (TensorLayout("a", (2,), "float32"), TensorLayout("n", (), "int64"))
    derived = np.array([3.0, 4.0], "<f4").tobytes() + (80_000).to_bytes(8, "little")
    stored = np.array([3.3, 3.6], "<f4").tobytes() + (79_999).to_bytes(8, "little")
    assert compare_states(layout, stored, derived, is_rounded=True) == {"a": pytest.approx(0.1), "n": 1.0}
    assert compare_states(layout, stored, derived) == {"a": pytest.approx(0.1), "n": 1.0}
    zeros = bytes(16)
    assert compare_states(layout, zeros, zeros, is_rounded=True) == {"a": 0.0, "n": 0.0}
    assert compare_states(layout, zeros, derived, is_rounded=True)["a"] == 1.0
    nan = np.array([np.nan, 4.0], "<f4").tobytes() + (80_000).to_bytes(8, "little")
    assert compare_states(layout, nan, derived, is_rounded=True) == {"a": float("inf"), "n": 0.0}


async def test_the_tolerance_is_the_callers() -> None:
    store, backend = SqliteSessionStore(None), FakeBackend()
    tolerances = dict.fromkeys(StateFormat, float("inf"))
    await commit_turns(store, backend, changes={"state": state_after(tuple(range(14)))})
    (found,) = [found async for found in verify(store, backend, [NAME], tolerances=tolerances)]
    assert dataclasses.replace(found, difference=0.0).verdict == "same"
