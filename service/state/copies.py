"""A session as one value that can begin another one: for forks and for files."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping

from nsm_core.errors import SnapshotCorrupt
from nsm_core.state.snapshot import Snapshot, replace_header
from service.stores.sessions.base import LogMark, LogTail, NewSession, SessionHead, SessionStore, StoredSession
from service.stores.sessions.errors import log_corrupt, session_busy
from service.stores.sessions.key import SessionKey
from service.stores.sessions.transitions import SnapshotMark

MAX_TRIES = 5  # each was disturbed by a rewind


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SessionCopy:
    """All parts of a session at one version. `snapshot`: the newest stored one, encoded; None where there is none, or
    where it was not asked for.
    """

    head: SessionHead
    snapshot: bytes | None
    log_ids: tuple[int, ...]
    marks: tuple[LogMark, ...]

    @property
    def tail(self) -> LogTail:
        """The log after the snapshot."""
        marks = tuple(mark for mark in self.marks if mark.version > self.head.snapshot_version)
        return LogTail(self.log_ids[self.head.snapshot_position :], marks)


async def read_copy(store: SessionStore, key: SessionKey, *, with_snapshot: bool = True) -> SessionCopy:
    """The session at its newest commit; a running turn neither prevents this nor is part of it. `with_snapshot`: False
    for head and log alone.

    Raises NotFound, SnapshotCorrupt, LogCorrupt when the log does not end where the head does, or SessionBusy when it
    was rewound again and again meanwhile.
    """
    for _ in range(MAX_TRIES):
        stored = await store.load(key) if with_snapshot else StoredSession(head=await store.get(key), snapshot=None)
        head = stored.head
        log_ids = await store.read_log(key, stop=head.num_log_tokens)
        marks = await store.log_marks(key)
        newest = await store.get(key)
        marks = tuple(mark for mark in marks if mark.version <= head.version)
        # A log only grows, but for a rewind; that drops the marks of the part it cuts off, and no version comes twice.
        if newest.created_at == head.created_at and _end(marks) == (head.version, head.num_log_tokens):
            return SessionCopy(head=head, snapshot=stored.snapshot, log_ids=log_ids, marks=marks)
        if newest == head:
            raise log_corrupt(head, f"it ends at {_end(marks)}, the head at {(head.version, head.num_log_tokens)}")
    raise session_busy(key.session_id)


def _end(marks: tuple[LogMark, ...]) -> tuple[int, int]:
    return (marks[-1].version, marks[-1].num_log_tokens) if marks else (0, 0)


async def create_copy(
    store: SessionStore,
    copy: SessionCopy,
    key: SessionKey,
    *,
    metadata: Mapping[str, str],
    ttl_s: float | None,
    forked_from: str | None,
) -> SessionHead:
    """A new session that continues where `copy` stands, at the same version: its turns keep their numbers.

    Raises VersionConflict when the id exists.
    """
    snapshot = copy.snapshot
    if snapshot is not None:
        snapshot = await asyncio.to_thread(_readdress, snapshot, copy.head, key)
    new = NewSession(
        key=key,
        model_fingerprint=copy.head.model_fingerprint,
        metadata=metadata,
        ttl_s=ttl_s,
        forked_from=forked_from,
        version=copy.head.version,
        position=copy.head.position,
        snapshot=snapshot,
        snapshot_mark=SnapshotMark(copy.head.snapshot_version, copy.head.snapshot_position),
        log_ids=copy.log_ids,
        marks=copy.marks,
        tokenizer_fingerprint=copy.head.tokenizer_fingerprint,
        numerics=copy.head.numerics,
        energy_joules=copy.head.energy_joules,
    )
    return await store.create(new)


def _readdress(raw: bytes, head: SessionHead, key: SessionKey) -> bytes:
    """The same state under another session's name, packed as before."""
    header = Snapshot.decode(raw).header
    found = (header.tenant, header.session_id, header.version, header.position)
    if found != (head.tenant, head.session_id, head.snapshot_version, head.snapshot_position):
        raise SnapshotCorrupt(f"the state stored for session {head.session_id!r} is not its own; it is not copied")
    return replace_header(raw, dataclasses.replace(header, tenant=key.tenant, session_id=key.session_id))
