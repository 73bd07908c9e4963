"""The changes of a session: its creation, a commit, a rewind, a snapshot. Each is written as a whole or not at all."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from service.stores.sessions.key import SessionKey
from service.stores.sessions.retention import NO_RETENTION, Retention
from service.stores.sessions.turn_records import EndedTurn

TOKEN_BYTES = 4  # of an id in a token log


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LogMark:
    """Where the log ended when the session became `version`.

    The last `num_sampled` tokens that this version added were sampled, those before them were read: with that, a lost
    state can be made again with its penalty counts. `seed`: the one it drew with; None at the start of the log alone.
    """

    version: int
    num_log_tokens: int
    num_sampled: int
    seed: int | None


@dataclasses.dataclass(frozen=True, slots=True)
class LogTail:
    """The log from the newest snapshot's position on, and the marks after its version, oldest first.

    Of a session without a snapshot: the whole log.
    """

    ids: tuple[int, ...] = ()
    marks: tuple[LogMark, ...] = ()


EMPTY_TAIL = LogTail()


@dataclasses.dataclass(frozen=True, slots=True)
class LogPoint:
    """The end of a version in a token log."""

    version: int
    num_log_tokens: int


@dataclasses.dataclass(frozen=True, slots=True)
class SnapshotMark:
    """The version whose state a snapshot is, and the number of tokens fed to reach it."""

    version: int
    position: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NewSession:
    """An empty session; or one that begins with a log, and a state: a fork, an import, a copy from another store.

    `ttl_s`, `forked_from` and the last three: see SessionHead. `marks`: where each turn in `log_ids` ended, oldest
    first, as `log_marks` gave them: the last is at `version` and the log's end. `snapshot`: None for an empty log, or
    one to be read again. `snapshot_mark`: its place in the log; None: at the end.
    """

    key: SessionKey
    model_fingerprint: str
    metadata: Mapping[str, str]
    ttl_s: float | None = None
    forked_from: str | None = None
    version: int = 0
    position: int = 0
    snapshot: bytes | None = None
    snapshot_mark: SnapshotMark | None = None
    log_ids: tuple[int, ...] = ()
    marks: tuple[LogMark, ...] = ()
    tokenizer_fingerprint: str = ""
    numerics: str = ""
    energy_joules: float = 0.0

    @property
    def num_bytes(self) -> int:
        """Of snapshot and log."""
        return len(self.snapshot or b"") + TOKEN_BYTES * len(self.log_ids)

    @property
    def newest_mark(self) -> SnapshotMark:
        """Of `snapshot`; zeros where there is none."""
        if self.snapshot is None:
            return SnapshotMark(0, 0)
        return self.snapshot_mark or SnapshotMark(self.version, self.position)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """The next version of a session after `expected_version`: `new_ids` were added to its log, the last `num_sampled`
    of them sampled with `seed`. `position`: tokens fed.

    `snapshot`: the state then; None leaves the stored one, from which the log leads to it. `turn`: the turn that ends
    with it, None for none. `retention`: the older snapshots that stay if it brings one. The last four: see
    SessionHead.

    `after`: the end of an earlier version that the turn went on from; what the log and the snapshots have behind it
    goes. `num_before_border`: so many of `new_ids` become a version of their own, before that of the rest.
    `snapshot_mark`: the version and position of `snapshot`; None: at the end.
    """

    expected_version: int
    snapshot: bytes | None
    position: int
    model_fingerprint: str
    new_ids: tuple[int, ...]
    num_sampled: int
    seed: int
    turn: EndedTurn | None = None
    retention: Retention = NO_RETENTION
    after: LogPoint | None = None
    num_before_border: int | None = None
    snapshot_mark: SnapshotMark | None = None
    tokenizer_fingerprint: str = ""
    numerics: str = ""
    energy_joules: float = 0.0
    replica: str = ""

    @property
    def version(self) -> int:
        return self.expected_version + (1 if self.num_before_border is None else 2)

    @property
    def newest_mark(self) -> SnapshotMark:
        """Of `snapshot`."""
        return self.snapshot_mark or SnapshotMark(self.version, self.position)

    @property
    def num_bytes(self) -> int:
        """Of snapshot and new tokens."""
        return len(self.snapshot or b"") + TOKEN_BYTES * len(self.new_ids)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LateSnapshot:
    """The state of a session's `version`, after `position` fed tokens, that is stored after its commit.

    `created_at`: the session's incarnation. `retention`: the older snapshots that stay.
    """

    created_at: float
    version: int
    position: int
    snapshot: bytes
    retention: Retention = NO_RETENTION

    @property
    def num_bytes(self) -> int:
        """Of the snapshot."""
        return len(self.snapshot)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rewind:
    """The next version of a session after `expected_version`: the first `num_log_tokens` of its log, and the state
    after `position` of them. `snapshot` and `seed` are None for an empty session.

    `num_sampled`: how many of the last tokens after the newest mark that stays were sampled. The last four: see
    SessionHead.
    """

    expected_version: int
    snapshot: bytes | None
    position: int
    model_fingerprint: str
    num_log_tokens: int
    num_sampled: int
    seed: int | None
    tokenizer_fingerprint: str = ""
    numerics: str = ""
    energy_joules: float = 0.0
    replica: str = ""

    @property
    def version(self) -> int:
        return self.expected_version + 1

    @property
    def num_bytes(self) -> int:
        """Of the snapshot."""
        return len(self.snapshot or b"")
