"""A fork has its own log and no snapshot. Until it has one, its first turn starts from a snapshot of its origin.

A state is a function of its log, so a snapshot of the origin is the fork's as well where both logs are the same up to
it; they are compared. An origin that is deleted, was taken back or never had a snapshot lends none: then the fork reads
its whole log.
"""

from __future__ import annotations

import asyncio
import dataclasses

from nsm_core.errors import NotFound, SnapshotCorrupt
from nsm_core.state.snapshot import Snapshot
from service.state.at_position import with_newest
from service.stores.sessions.base import LogTail, SessionHead, SessionStore, StoredSession
from service.stores.sessions.key import SessionKey
from service.stores.sessions.retention import RetainedSnapshot

MAX_GENERATIONS = 8  # forks of forks: an origin without a snapshot asks its own origin


async def with_origins_snapshot(store: SessionStore, stored: StoredSession) -> StoredSession:
    """`stored` as if a snapshot that an origin has were its own; as it is where none fits, or it needs none.

    Raises what the store raises, but for an origin that is not there or whose log is damaged.
    """
    head, tail = stored.head, stored.tail
    if stored.snapshot is not None or stored.damage is not None or tail is None or head.snapshot_version:
        return stored
    origin = head.forked_from
    for _ in range(MAX_GENERATIONS):
        if origin is None or not tail.marks:
            break
        ancestor = SessionKey(head.tenant, origin.rpartition("@")[0])
        try:
            borrowed = await _snapshot_of(store, ancestor, head, tail)
            if borrowed is not None:
                return borrowed
            origin = (await store.get(ancestor)).forked_from
        except (NotFound, SnapshotCorrupt):
            break
    return stored


async def _snapshot_of(
    store: SessionStore, ancestor: SessionKey, head: SessionHead, tail: LogTail
) -> StoredSession | None:
    """`tail`: the borrower's whole log."""
    origin = await store.get(ancestor)
    marks = {mark.version: mark for mark in tail.marks}
    for one in reversed(with_newest(await store.list_retained(ancestor), origin)):
        mark = marks.get(one.version)
        if mark is None or mark.num_log_tokens - one.position not in (0, 1):  # 1: a pending token
            continue
        same = tuple(mark for mark in tail.marks if mark.version <= one.version)
        is_same = await store.read_log(ancestor, stop=mark.num_log_tokens) == tail.ids[: mark.num_log_tokens]
        if not is_same or (await store.log_marks(ancestor))[: len(same)] != same:
            continue
        raw = await store.load_retained(ancestor, version=one.version)
        borrowed = None if raw is None else await asyncio.to_thread(_as_own, raw, one, origin, head, tail)
        if borrowed is not None:
            return borrowed
    return None


def _as_own(
    raw: bytes, one: RetainedSnapshot, origin: SessionHead, head: SessionHead, tail: LogTail
) -> StoredSession | None:
    """None for a snapshot that is not the origin's, or of another model than the borrower's."""
    snapshot = Snapshot.decode(raw, is_verified=True)  # by the store
    header = snapshot.header
    found = (header.tenant, header.session_id, header.version, header.position, header.model_fingerprint)
    if found != (*origin.key, one.version, one.position, head.model_fingerprint):
        return None
    own = Snapshot(dataclasses.replace(header, session_id=head.session_id), snapshot.state)
    rest = LogTail(tail.ids[one.position :], tuple(mark for mark in tail.marks if mark.version > one.version))
    borrower = dataclasses.replace(
        head, snapshot_version=one.version, snapshot_position=one.position, snapshot_bytes=len(raw)
    )
    return StoredSession(head=borrower, snapshot=None, tail=rest, decoded=own)
