"""The changes of a session: its creation, a commit, a rewind. Each is written as a whole or not at all."""

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


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NewSession:
    """An empty session; or one that begins with a state and a log: a fork, an import, a copy from another store.

    `ttl_s`, `forked_from`: see SessionHead. `marks`: where each turn in `log_ids` ended, oldest first, as `log_marks`
    gave them: the last is at `version` and the log's end. `snapshot` is None if and only if the log is empty.
    """

    key: SessionKey
    model_fingerprint: str
    metadata: Mapping[str, str]
    ttl_s: float | None = None
    forked_from: str | None = None
    version: int = 0
    position: int = 0
    snapshot: bytes | None = None
    log_ids: tuple[int, ...] = ()
    marks: tuple[LogMark, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Of snapshot and log."""
        return len(self.snapshot or b"") + TOKEN_BYTES * len(self.log_ids)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """The next version of a session after `expected_version`: `new_ids` were added to its log, the last `num_sampled`
    of them sampled with `seed`; `snapshot` is the state after `position` fed tokens.

    `turn`: the turn that ends with it, None for none. `retention`: the older snapshots that stay.
    """

    expected_version: int
    snapshot: bytes
    position: int
    model_fingerprint: str
    new_ids: tuple[int, ...]
    num_sampled: int
    seed: int
    turn: EndedTurn | None = None
    retention: Retention = NO_RETENTION

    @property
    def version(self) -> int:
        return self.expected_version + 1

    @property
    def num_bytes(self) -> int:
        """Of snapshot and new tokens."""
        return len(self.snapshot) + TOKEN_BYTES * len(self.new_ids)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rewind:
    """The next version of a session after `expected_version`: the first `num_log_tokens` of its log, and the state
    after `position` of them. `snapshot` and `seed` are None for an empty session.

    `num_sampled`: how many of the last tokens after the newest mark that stays were sampled.
    """

    expected_version: int
    snapshot: bytes | None
    position: int
    model_fingerprint: str
    num_log_tokens: int
    num_sampled: int
    seed: int | None

    @property
    def version(self) -> int:
        return self.expected_version + 1

    @property
    def num_bytes(self) -> int:
        """Of the snapshot."""
        return len(self.snapshot or b"")
