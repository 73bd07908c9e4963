"""Sessions in this process's memory: for tests, and for servers that need not remember."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType

from nsm_core.state.snapshot import verify
from service.sessions.base import SessionHead, SessionPage, StoredSession
from service.sessions.records import already_exists, decode_cursor, encode_cursor, not_found, require_same_head


@dataclasses.dataclass(slots=True)
class _Record:
    head: SessionHead
    snapshot: bytes | None = None
    log: tuple[int, ...] = ()


class MemorySessionStore:
    """A SessionStore that forgets when the process ends. Every method runs without awaiting: it is atomic by itself."""

    def __init__(self, *, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._records: dict[tuple[str, str], _Record] = {}

    async def open(self) -> None:
        pass

    async def close(self) -> None:
        pass

    async def create(
        self, *, tenant: str, session_id: str, model_fingerprint: str, metadata: Mapping[str, str]
    ) -> SessionHead:
        if (tenant, session_id) in self._records:
            raise already_exists(session_id)
        now = self._clock()
        head = SessionHead(
            tenant=tenant,
            session_id=session_id,
            version=0,
            position=0,
            created_at=now,
            updated_at=now,
            model_fingerprint=model_fingerprint,
            metadata=MappingProxyType(dict(metadata)),
            num_log_tokens=0,
            snapshot_bytes=0,
        )
        self._records[tenant, session_id] = _Record(head)
        return head

    async def get(self, *, tenant: str, session_id: str) -> SessionHead:
        return self._record(tenant, session_id).head

    async def load(self, *, tenant: str, session_id: str) -> StoredSession:
        record = self._record(tenant, session_id)
        if record.snapshot is not None:
            verify(record.snapshot)
        return StoredSession(head=record.head, snapshot=record.snapshot)

    async def commit(
        self,
        *,
        tenant: str,
        session_id: str,
        created_at: float,
        expected_version: int,
        snapshot: bytes,
        position: int,
        model_fingerprint: str,
        new_ids: tuple[int, ...],
    ) -> SessionHead:
        record = self._record(tenant, session_id)
        require_same_head(record.head, created_at=created_at, expected_version=expected_version)
        record.head = dataclasses.replace(
            record.head,
            version=expected_version + 1,
            position=position,
            updated_at=self._clock(),
            model_fingerprint=model_fingerprint,
            num_log_tokens=record.head.num_log_tokens + len(new_ids),
            snapshot_bytes=len(snapshot),
        )
        record.snapshot = snapshot
        record.log += new_ids
        return record.head

    async def read_log(self, *, tenant: str, session_id: str) -> tuple[int, ...]:
        return self._record(tenant, session_id).log

    async def delete(self, *, tenant: str, session_id: str) -> None:
        self._record(tenant, session_id)
        del self._records[tenant, session_id]

    async def list(self, *, tenant: str, limit: int, cursor: str | None = None) -> SessionPage:
        heads = [record.head for (owner, _), record in self._records.items() if owner == tenant]
        if cursor is not None:
            place = decode_cursor(cursor)
            heads = [head for head in heads if (head.created_at, head.session_id) < place]
        heads.sort(key=lambda head: (head.created_at, head.session_id), reverse=True)
        page = tuple(heads[:limit])
        return SessionPage(heads=page, next_cursor=encode_cursor(page[-1]) if len(heads) > limit else None)

    async def check_writable(self) -> None:
        pass

    def _record(self, tenant: str, session_id: str) -> _Record:
        try:
            return self._records[tenant, session_id]
        except KeyError:
            raise not_found(session_id) from None
