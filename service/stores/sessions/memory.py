"""Sessions in this process's memory: for tests, and for servers that need not remember."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Literal

from service.stores.sessions.base import (
    UNSET,
    Commit,
    Lease,
    LeasedSession,
    LogMark,
    NewSession,
    Rewind,
    SessionHead,
    SessionPage,
    StoredSession,
    StoreRoom,
    TenantUsage,
    Unset,
)
from service.stores.sessions.codec import (
    TOKEN_BYTES,
    checked,
    decode_cursor,
    encode_cursor,
    expiry,
    new_head,
    require_sound,
    sound,
)
from service.stores.sessions.errors import already_exists, lease_lost, not_found, require_version, session_busy
from service.stores.sessions.key import SessionKey
from service.stores.sessions.memory_turns import MemoryTurns
from service.stores.sessions.retention import RetainedSnapshot
from service.stores.sessions.turn_records import EndedTurn, TurnRecord, TurnStart


@dataclasses.dataclass(slots=True)
class _Record:
    head: SessionHead
    snapshot: bytes | None = None
    log: tuple[int, ...] = ()
    marks: tuple[LogMark, ...] = ()
    fence: int = 0
    holder: str | None = None
    lease_expires_at: float = 0.0
    turns: MemoryTurns = dataclasses.field(default_factory=MemoryTurns)
    retained: dict[RetainedSnapshot, bytes] = dataclasses.field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        retained_bytes = sum(one.num_bytes for one in self.retained)
        return self.head.snapshot_bytes + retained_bytes + TOKEN_BYTES * self.head.num_log_tokens + self.turns.num_bytes

    def is_leased(self, now: float) -> bool:
        return self.holder is not None and now < self.lease_expires_at

    def lease_left_s(self, now: float) -> float:
        return max(0.0, self.lease_expires_at - now) if self.is_leased(now) else 0.0

    def is_expired(self, now: float) -> bool:
        return self.head.expires_at is not None and now >= self.head.expires_at and not self.is_leased(now)

    def fits(self, lease: Lease) -> bool:
        """Whether `lease` is the newest one, not released, of this incarnation."""
        mine = (self.head.created_at, self.holder, self.fence)
        return mine == (lease.created_at, lease.holder, lease.fence)


class MemorySessionStore:
    """A SessionStore that forgets when the process ends. Every method runs without awaiting: it is atomic by itself."""

    def __init__(self, *, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._records: dict[SessionKey, _Record] = {}

    async def open(self) -> None:
        pass

    async def close(self) -> None:
        pass

    async def create(self, new: NewSession) -> SessionHead:
        now = self._clock()
        record = self._records.get(new.key)
        if record is not None and not record.is_expired(now):
            raise already_exists(new.key.session_id)
        head = new_head(new, now)
        self._records[new.key] = _Record(head, new.snapshot, new.log_ids, new.marks)
        return head

    async def update(
        self,
        key: SessionKey,
        *,
        metadata: Mapping[str, str] | None = None,
        ttl_s: float | Unset | None = UNSET,
    ) -> SessionHead:
        now = self._clock()
        record = self._record(key, now)
        head = record.head
        ttl_s = head.ttl_s if isinstance(ttl_s, Unset) else ttl_s
        record.head = dataclasses.replace(
            head,
            metadata=head.metadata if metadata is None else MappingProxyType(dict(metadata)),
            ttl_s=ttl_s,
            expires_at=expiry(now, ttl_s),
            updated_at=now,
        )
        return record.head

    async def get(self, key: SessionKey) -> SessionHead:
        return self._record(key, self._clock()).head

    async def load(self, key: SessionKey) -> StoredSession:
        record = self._record(key, self._clock())
        return require_sound(record.head, record.snapshot)

    async def acquire(self, key: SessionKey, *, holder: str, lease_s: float) -> LeasedSession:
        now = self._clock()
        record = self._record(key, now)
        if record.is_leased(now):
            raise session_busy(key.session_id, record.lease_expires_at - now)
        record.fence += 1
        record.holder, record.lease_expires_at = holder, now + lease_s
        lease = Lease(
            tenant=key.tenant,
            session_id=key.session_id,
            created_at=record.head.created_at,
            holder=holder,
            fence=record.fence,
            expires_at=record.lease_expires_at,
        )
        return LeasedSession(lease=lease, stored=checked(record.head, record.snapshot), retained=tuple(record.retained))

    async def renew(self, lease: Lease, *, lease_s: float) -> Lease:
        now = self._clock()
        record = self._records.get(lease.key)
        if record is None or record.is_expired(now) or not record.fits(lease):
            raise lease_lost(lease)
        record.lease_expires_at = now + lease_s
        return dataclasses.replace(lease, expires_at=record.lease_expires_at)

    async def release(self, lease: Lease) -> None:
        record = self._records.get(lease.key)
        if record is not None and record.fits(lease):
            record.holder = None

    async def commit(self, lease: Lease, commit: Commit) -> SessionHead:
        now = self._clock()
        record, retention = self._writable(lease, commit.expected_version, now), commit.retention
        record.turns.end_running(commit.turn, now)
        record.retained = {one: raw for one, raw in record.retained.items() if one.version in retention.keep}
        if retention.add is not None:
            record.retained[retention.add] = retention.snapshot
        record.log += commit.new_ids
        record.marks += (_mark(commit, len(record.log)),)
        return self._move(record, commit, now)

    async def rewind(self, lease: Lease, rewind: Rewind) -> SessionHead:
        now, end = self._clock(), rewind.num_log_tokens
        record = self._writable(lease, rewind.expected_version, now)
        record.turns.end_running(None, now)
        record.log = record.log[:end]
        stay = [old for old in record.marks if old.num_log_tokens <= end]
        record.turns.drop_results(stay[-1].version if stay else 0)
        record.marks = (*stay, _mark(rewind, end))
        end = end if rewind.model_fingerprint == record.head.model_fingerprint else 0
        record.retained = {one: raw for one, raw in record.retained.items() if one.position <= end}
        return self._move(record, rewind, now)

    async def read_log(self, key: SessionKey, *, stop: int | None = None) -> tuple[int, ...]:
        return self._record(key, self._clock()).log[:stop]

    async def log_marks(self, key: SessionKey) -> tuple[LogMark, ...]:
        return self._record(key, self._clock()).marks

    async def list_retained(self, key: SessionKey) -> tuple[RetainedSnapshot, ...]:
        return tuple(self._record(key, self._clock()).retained)

    async def load_retained(self, key: SessionKey, *, version: int) -> bytes | None:
        kept = self._record(key, self._clock()).retained
        return sound(next((raw for one, raw in kept.items() if one.version == version), None))

    async def delete(self, key: SessionKey) -> None:
        self._record(key, self._clock())
        del self._records[key]

    async def list(self, *, tenant: str, limit: int, cursor: str | None = None) -> SessionPage:
        now = self._clock()
        heads = [record.head for record in self._records.values() if not record.is_expired(now)]
        heads = [head for head in heads if head.tenant == tenant]
        if cursor is not None:
            place = decode_cursor(cursor)
            heads = [head for head in heads if (head.created_at, head.session_id) < place]
        heads.sort(key=lambda head: (head.created_at, head.session_id), reverse=True)
        page = tuple(heads[:limit])
        return SessionPage(heads=page, next_cursor=encode_cursor(page[-1]) if len(heads) > limit else None)

    async def list_tenants(self) -> tuple[str, ...]:
        return tuple(sorted({tenant for tenant, _ in self._records}))

    async def usage(self, *, tenant: str) -> TenantUsage:
        records = [record for (owner, _), record in self._records.items() if owner == tenant]
        return TenantUsage(num_sessions=len(records), num_bytes=sum(record.num_bytes for record in records))

    async def room(self) -> StoreRoom | None:
        return None

    async def remove_expired(self) -> int:
        now = self._clock()
        expired = [key for key, record in self._records.items() if record.is_expired(now)]
        for key in expired:
            del self._records[key]
        for record in self._records.values():
            record.turns.remove_expired(now)
        return len(expired)

    async def check_writable(self) -> None:
        pass

    async def begin_turn(self, lease: Lease, start: TurnStart, *, max_records: int) -> TurnRecord:
        now = self._clock()
        record = self._held(lease, now)
        return record.turns.begin(start, record.head, max_records=max_records, now=now)

    async def append_turn(self, lease: Lease, turn_id: str, *, index: int, chunk: bytes) -> bool:
        return self._held(lease, self._clock()).turns.append(turn_id, index, chunk)

    async def end_turn(self, lease: Lease, ended: EndedTurn, *, status: Literal["failed", "cancelled"]) -> None:
        now = self._clock()
        self._held(lease, now).turns.end(ended, status, now)

    async def forget_turn(self, lease: Lease, turn_id: str) -> None:
        self._held(lease, self._clock()).turns.forget(turn_id)

    async def get_turn(
        self,
        key: SessionKey,
        *,
        turn_id: str | None = None,
        identity: str | None = None,
        first_chunk: int = 0,
        with_request: bool = True,
    ) -> TurnRecord | None:
        now = self._clock()
        record = self._records.get(key)
        if record is None or record.is_expired(now):
            return None
        found = record.turns.get(turn_id, identity, now=now, first_chunk=first_chunk)
        if found is None:
            return None
        request = found.request if with_request else b""
        return dataclasses.replace(found, request=request, lease_left_s=record.lease_left_s(now))

    async def cancel_turn(self, key: SessionKey) -> TurnRecord | None:
        now = self._clock()
        record = self._record(key, now)
        is_held = record.is_leased(now)
        found = record.turns.cancel(is_held=is_held, now=now)
        if found is not None and not is_held:
            record.holder = None
        return found and dataclasses.replace(found, lease_left_s=record.lease_left_s(now))

    def _record(self, key: SessionKey, now: float) -> _Record:
        record = self._records.get(key)
        if record is None or record.is_expired(now):
            raise not_found(key.session_id)
        return record

    def _held(self, lease: Lease, now: float) -> _Record:
        record = self._record(lease.key, now)
        if not record.fits(lease):
            raise lease_lost(lease)
        return record

    def _writable(self, lease: Lease, expected_version: int, now: float) -> _Record:
        record = self._held(lease, now)
        require_version(record.head, expected_version)
        return record

    @staticmethod
    def _move(record: _Record, change: Commit | Rewind, now: float) -> SessionHead:
        """The end of a commit or a rewind, after log and marks have changed."""
        record.snapshot, record.holder = change.snapshot, None
        record.head = dataclasses.replace(
            record.head,
            version=change.version,
            position=change.position,
            updated_at=now,
            model_fingerprint=change.model_fingerprint,
            num_log_tokens=len(record.log),
            snapshot_bytes=len(change.snapshot or b""),
            expires_at=expiry(now, record.head.ttl_s),
        )
        return record.head


def _mark(change: Commit | Rewind, num_log_tokens: int) -> LogMark:
    return LogMark(
        version=change.version, num_log_tokens=num_log_tokens, num_sampled=change.num_sampled, seed=change.seed
    )
