"""A store in which no tenant creates more than it may, whoever asks."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

from service.stores.sessions.base import SessionHead, SessionStore
from service.stores.sessions.codec import TOKEN_BYTES


class Quotas(Protocol):
    def new_session(self, tenant: str, *, num_bytes: int = 0) -> AbstractAsyncContextManager[None]:
        """Around a creation; raises QuotaExceeded."""
        ...


class QuotaStore:
    """The store it stands for, but that `create` and `create_with` also raise QuotaExceeded.

    What begins a session is many things (a new one, a fork, an import); each comes through here.
    """

    def __init__(self, store: SessionStore, quotas: Quotas) -> None:
        self._store = store
        self._quotas = quotas
        self.open, self.close = store.open, store.close
        self.get, self.load, self.update, self.delete = store.get, store.load, store.update, store.delete
        self.acquire, self.renew, self.release = store.acquire, store.renew, store.release
        self.commit, self.rewind = store.commit, store.rewind
        self.begin_turn, self.append_turn, self.end_turn = store.begin_turn, store.append_turn, store.end_turn
        self.forget_turn, self.get_turn, self.cancel_turn = store.forget_turn, store.get_turn, store.cancel_turn
        self.read_log, self.log_marks, self.list = store.read_log, store.log_marks, store.list
        self.list_tenants = store.list_tenants
        self.list_retained, self.load_retained = store.list_retained, store.load_retained
        self.usage, self.room = store.usage, store.room
        self.remove_expired, self.check_writable = store.remove_expired, store.check_writable

    async def create(
        self,
        *,
        tenant: str,
        session_id: str,
        model_fingerprint: str,
        metadata: Mapping[str, str],
        ttl_s: float | None = None,
    ) -> SessionHead:
        async with self._quotas.new_session(tenant):
            return await self._store.create(
                tenant=tenant,
                session_id=session_id,
                model_fingerprint=model_fingerprint,
                metadata=metadata,
                ttl_s=ttl_s,
            )

    async def create_with(
        self, *, tenant: str, snapshot: bytes | None, log_ids: tuple[int, ...], **fields: Any
    ) -> SessionHead:
        num_bytes = len(snapshot or b"") + TOKEN_BYTES * len(log_ids)
        async with self._quotas.new_session(tenant, num_bytes=num_bytes):
            return await self._store.create_with(tenant=tenant, snapshot=snapshot, log_ids=log_ids, **fields)
