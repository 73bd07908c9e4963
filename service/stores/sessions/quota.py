"""A store in which no tenant creates more than its quota."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import Protocol

from service.stores.sessions.base import NewSession, SessionHead, SessionStore


class Quotas(Protocol):
    def new_session(self, tenant: str, *, num_bytes: int = 0) -> AbstractAsyncContextManager[None]:
        """Around a creation; raises QuotaExceeded."""
        ...


class QuotaStore:
    """The store it stands for, but that `create` also raises QuotaExceeded.

    New sessions, forks and imports all come through here.
    """

    def __init__(self, store: SessionStore, quotas: Quotas) -> None:
        self._store = store
        self._quotas = quotas
        self.snapshot_writes = store.snapshot_writes
        self.max_uncounted_request = store.max_uncounted_request
        self.open, self.close = store.open, store.close
        self.get, self.load, self.update, self.delete = store.get, store.load, store.update, store.delete
        self.acquire, self.renew, self.release = store.acquire, store.renew, store.release
        self.commit, self.rewind, self.put_snapshot = store.commit, store.rewind, store.put_snapshot
        self.begin_turn, self.append_turn, self.end_turn = store.begin_turn, store.append_turn, store.end_turn
        self.forget_turn, self.get_turn, self.cancel_turn = store.forget_turn, store.get_turn, store.cancel_turn
        self.read_log, self.log_marks, self.list = store.read_log, store.log_marks, store.list
        self.list_tenants = store.list_tenants
        self.list_retained, self.load_retained = store.list_retained, store.load_retained
        self.shed_snapshots = store.shed_snapshots
        self.usage, self.room = store.usage, store.room
        self.remove_expired, self.check_writable = store.remove_expired, store.check_writable

    async def create(self, new: NewSession) -> SessionHead:
        async with self._quotas.new_session(new.key.tenant, num_bytes=new.num_bytes):
            return await self._store.create(new)
