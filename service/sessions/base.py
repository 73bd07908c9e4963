"""The seam between the gateway and whatever keeps sessions."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Protocol


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SessionHead:
    """The named, mutable head of a session.

    `version` rises by one with each committed turn, from 0 for a session that has none; `position` counts the tokens
    fed; times are unix seconds of the store's clock.
    """

    tenant: str
    session_id: str
    version: int
    position: int
    created_at: float
    updated_at: float
    model_fingerprint: str
    metadata: Mapping[str, str]
    num_log_tokens: int
    snapshot_bytes: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StoredSession:
    """A head with the encoded snapshot of its newest version (None at version 0)."""

    head: SessionHead
    snapshot: bytes | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SessionPage:
    """One page of a listing, newest first; `next_cursor` is None on the last page."""

    heads: tuple[SessionHead, ...]
    next_cursor: str | None


class SessionStore(Protocol):
    """A store of record. Every call names the tenant: another tenant's session does not exist.

    Errors: NotFound (code `session_not_found`), VersionConflict, SnapshotCorrupt, StoreUnavailable, StorageFull.
    Implementations: `sqlite`, `memory`.
    """

    async def open(self) -> None:
        """Connect, create or check the schema; raises StoreUnavailable or ConfigError (schema of a newer version)."""
        ...

    async def close(self) -> None:
        """Idempotent; every acknowledged commit is durable before it returns."""
        ...

    async def create(
        self, *, tenant: str, session_id: str, model_fingerprint: str, metadata: Mapping[str, str]
    ) -> SessionHead:
        """A new head at version 0; raises VersionConflict when the id exists for this tenant."""
        ...

    async def get(self, *, tenant: str, session_id: str) -> SessionHead: ...

    async def load(self, *, tenant: str, session_id: str) -> StoredSession:
        """Head and snapshot in one consistent read; raises SnapshotCorrupt when the bytes fail their checksum."""
        ...

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
        """Atomically: append `new_ids` to the token log, store the snapshot, move the head to expected_version + 1.

        Durable when it returns (survives kill -9). Raises VersionConflict if the head is not at expected_version or was
        not created at `created_at` (deleted meanwhile and made again under its old id), NotFound if it is gone; then
        nothing changed.
        """
        ...

    async def read_log(self, *, tenant: str, session_id: str) -> tuple[int, ...]:
        """Every id fed and sampled, in order."""
        ...

    async def delete(self, *, tenant: str, session_id: str) -> None:
        """Head, snapshots and log are gone when it returns; raises NotFound."""
        ...

    async def list(self, *, tenant: str, limit: int, cursor: str | None = None) -> SessionPage:
        """Newest first by creation; a cursor stays good whatever is created or deleted.

        Raises InvalidRequest for a cursor that no page gave.
        """
        ...

    async def check_writable(self) -> None:
        """The readiness probe: a real write; raises StoreUnavailable or StorageFull."""
        ...
