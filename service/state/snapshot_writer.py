"""Snapshots on their way to the store, after their turns were committed: one at a time, the newest first.

A snapshot that is dropped or not stored costs the reading of tokens at a later turn, and nothing else.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable

from nsm_core.errors import NotFound, NsmError
from nsm_core.state.snapshot import Snapshot
from service.state.hot_states import HotState
from service.stores.sessions.base import LateSnapshot, SessionHead, SessionStore
from service.stores.sessions.key import SessionKey
from service.stores.sessions.retention import NO_RETENTION, Retention, plan_retention
from service.telemetry.metrics.metrics import Metrics

logger = logging.getLogger("nsm.snapshots")

MAX_PENDING_BYTES = 256 * 1024 * 1024  # of states that wait


class SnapshotWriter:
    """`on_end(key, head)` is called after each: with the head that names the snapshot, or None where it was not stored.

    `max_retained`: how many older snapshots a session keeps. `fetch` gives a state with its bytes, or None.
    """

    def __init__(
        self,
        store: SessionStore,
        metrics: Metrics,
        *,
        max_retained: int,
        on_end: Callable[[SessionKey, SessionHead | None], None],
        fetch: Callable[[HotState], Awaitable[Snapshot | None]],
        max_bytes: int = MAX_PENDING_BYTES,
    ) -> None:
        self._store = store
        self._metrics = metrics
        self._max_retained = max_retained
        self._on_end, self._fetch = on_end, fetch
        self._max_bytes = max_bytes
        self._pending: OrderedDict[SessionKey, HotState] = OrderedDict()
        self._task: asyncio.Task[None] | None = None

    def add(self, pending: HotState) -> None:
        """Never blocks, never fails. It takes the place of the session's last one; too many at once: the oldest go."""
        key = pending.head.key
        self._pending[key] = pending
        self._pending.move_to_end(key)
        while len(self._pending) > 1 and self._num_bytes > self._max_bytes:
            dropped, _ = self._pending.popitem(last=False)
            self._metrics.sessions.snapshot_ended("dropped")
            self._on_end(dropped, None)
        if self._task is None:
            self._task = asyncio.create_task(self._write_all())

    def forget(self, key: SessionKey) -> None:
        """The session is deleted, or was taken back."""
        self._pending.pop(key, None)

    async def drain(self, timeout_s: float) -> None:
        """Waits for those that are there; drops what takes longer."""
        if self._task is not None:
            await asyncio.wait((self._task,), timeout=timeout_s)
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))
        for _ in self._pending:
            self._metrics.sessions.snapshot_ended("dropped")
        self._pending.clear()

    @property
    def _num_bytes(self) -> int:
        return sum(len(pending.snapshot.state) for pending in self._pending.values())

    async def _write_all(self) -> None:
        try:
            while self._pending:
                key, pending = self._pending.popitem(last=True)
                self._on_end(key, await self._write(key, pending))
        finally:
            self._task = None

    async def _write(self, key: SessionKey, pending: HotState) -> SessionHead | None:
        header = pending.snapshot.header
        try:
            snapshot = await self._fetch(pending)
            if snapshot is None:
                self._metrics.sessions.snapshot_ended("dropped")
                return None
            raw = await asyncio.to_thread(snapshot.encode, is_packed=True)
            late = LateSnapshot(
                created_at=pending.head.created_at,
                version=header.version,
                position=header.position,
                snapshot=raw,
                retention=await self._retention(key, pending.snapshot),
            )
            stored = await self._store.put_snapshot(key, late)
        except NotFound:
            stored = None
        except NsmError as error:
            logger.warning("a state of session %s was not stored; its log has all of it: %s", key.session_id, error)
            self._metrics.sessions.snapshot_ended("failed")
            return None
        self._metrics.sessions.snapshot_ended("outdated" if stored is None else "stored")
        return stored

    async def _retention(self, key: SessionKey, snapshot: Snapshot) -> Retention:
        if not self._max_retained:
            return NO_RETENTION
        head, header = await self._store.get(key), snapshot.header
        if head.model_fingerprint != header.model_fingerprint:
            return NO_RETENTION
        keep = plan_retention(
            await self._store.list_retained(key),
            head.newest_snapshot,
            position=header.position,
            max_retained=self._max_retained,
        )
        return Retention(keep=keep)
