"""The token log as the truth: a session's sampler at any position, and the reasons to rebuild a state."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal

from nsm_core.errors import SnapshotCorrupt
from nsm_core.state.snapshot import SamplerState
from service.stores.sessions.base import LogMark, SessionHead, SessionStore

RebuildReason = Literal["missing", "corrupt"]
LossReason = Literal["missing", "corrupt", "fingerprint_mismatch"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LostState:
    """A state that cannot be used but may be made again: one of another model by a migration alone. `sampler`: the
    stored one, where it could be read.
    """

    reason: LossReason
    sampler: SamplerState | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """A session whose state is made again from its log, which has at least one token, and the marks of its turns."""

    reason: RebuildReason
    log_ids: tuple[int, ...]
    seed: int
    generated_counts: Mapping[int, int]
    marks: tuple[LogMark, ...] = ()


def make_replay(lost: LostState, head: SessionHead, *, log_ids: tuple[int, ...], marks: Sequence[LogMark]) -> Replay:
    """Raises SnapshotCorrupt when the log is not the head's."""
    if len(log_ids) != head.num_log_tokens:
        raise SnapshotCorrupt(
            f"the token log of session {head.session_id!r} has {len(log_ids)} tokens of {head.num_log_tokens}"
        )
    if lost.sampler is not None:
        seed, counts = lost.sampler.seed, lost.sampler.generated_counts
    else:
        seed, counts = seed_of(marks), sampled_counts(log_ids, marks)
    # of another model's session the running model has no state
    reason: RebuildReason = "missing" if lost.reason == "fingerprint_mismatch" else lost.reason
    return Replay(reason=reason, log_ids=log_ids, seed=seed, generated_counts=counts, marks=tuple(marks))


async def read_replay(store: SessionStore, lost: LostState, head: SessionHead) -> Replay:
    """`make_replay` from the stored log. Raises NotFound or SnapshotCorrupt."""
    log_ids = await store.read_log(head.key, stop=head.num_log_tokens)
    marks = [mark for mark in await store.log_marks(head.key) if mark.num_log_tokens <= head.num_log_tokens]
    return make_replay(lost, head, log_ids=log_ids, marks=marks)


def sampled_counts(log_ids: Sequence[int], marks: Sequence[LogMark], *, start: int = 0) -> dict[int, int]:
    """How often each token of `log_ids` was sampled rather than read. `marks` may go on after the end of `log_ids`.

    `start`: tokens of the log before `log_ids`; the turns of `marks` began after them.
    """
    counts: Counter[int] = Counter()
    for mark in marks:
        end = mark.num_log_tokens - start
        counts.update(log_ids[end - mark.num_sampled : end])
    return dict(counts)


def seed_of(marks: Sequence[LogMark]) -> int:
    """The seed of the last of these turns that has one. Raises SnapshotCorrupt where none has."""
    seed = next((mark.seed for mark in reversed(marks) if mark.seed is not None), None)
    if seed is None:
        raise SnapshotCorrupt("the token log has no seed")
    return seed
