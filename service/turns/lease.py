"""A session's lease while work goes on under it: taken, renewed in a task of its own, given back."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
import uuid
from collections.abc import Awaitable, Callable
from typing import Literal, NamedTuple, TypeVar

from nsm_core.errors import LeaseLost, NsmError, SessionBusy
from nsm_core.random_ids import random_id
from nsm_core.state.quantize import StateFormat
from nsm_core.state.snapshot import Snapshot
from service.state.hot_states import HotState
from service.stores.sessions.base import Commit, Lease, LeasedSession, Rewind, SessionHead, SessionStore
from service.stores.sessions.key import SessionKey
from service.stores.sessions.retention import NO_RETENTION, Retention, plan_retention
from service.stores.sessions.turn_records import EndedTurn, TurnRecord, TurnStart
from service.telemetry.metrics.metrics import Metrics

logger = logging.getLogger("nsm.leases")

Change = TypeVar("Change", Commit, Rewind)

RENEWALS_PER_LEASE = 3  # two may fail before the lease runs out
NO_CHUNKS = 2**31 - 1  # the record without its chunks


class DueTurn(NamedTuple):
    """A turn whose record is still to begin."""

    start: TurnStart
    max_records: int


class HeldLease:
    """A lease that is renewed until `commit`, `rewind` or `give_back`. Made by `Leases.take`.

    `record`: of the turn that began with it, or of the one that its request is a retry of; None where none was to, or
    where another turn was abandoned: that one stays until `begin_due_turn`, or a write. `state_format`: how the state
    that is committed under it is to be stored. `hot`: the state of the head that the caller had, None where it had none
    or an older one; `border`: see HotState.
    """

    def __init__(
        self,
        store: SessionStore,
        leased: LeasedSession,
        *,
        lease_s: float,
        metrics: Metrics,
        max_retained: int,
        state_format: StateFormat,
        on_lost: Callable[[NsmError], None],
        hot: Snapshot | None = None,
        border: Snapshot | None = None,
        replica: str = "",
        due: DueTurn | None = None,
    ) -> None:
        self.stored = leased.stored
        self.hot = hot if leased.is_known else None
        self.border = border if leased.is_known else None
        self.retained = leased.retained
        self.state_format = state_format
        self._max_retained = max_retained
        self.record = leased.record
        self._due = due if leased.record is None else None
        self.fence = leased.lease.fence
        self.has_written = False
        self.replica = replica
        self._lease = leased.lease
        self._store = store
        self._lease_s = lease_s
        self._metrics = metrics
        self._on_lost = on_lost
        self._is_over = self._is_stopping = False
        self._timer: asyncio.TimerHandle | None = None
        self._renewing: asyncio.Task[None] | None = None
        self._renew_later()

    async def commit(self, commit: Commit) -> SessionHead:
        """`SessionStore.commit` under this lease, which is over if it succeeds. Older snapshots are kept by plan."""
        if commit.snapshot is not None:
            retention = self._retention(commit.newest_mark.position, commit.model_fingerprint)
            commit = dataclasses.replace(commit, retention=retention)
        if commit.replica != self.replica:
            commit = dataclasses.replace(commit, replica=self.replica)
        return await self._write(self._store.commit, commit)

    async def start_without(self, bytes_of: Callable[[Snapshot], Awaitable[Snapshot | None]]) -> None:
        """`hot` stays with an engine that cannot go on from it. In its place come its bytes, or what is stored."""
        self.hot = None if self.hot is None else await bytes_of(self.hot)
        if self.hot is None:
            self.stored = await self._store.load(self._lease.key)

    async def rewind(self, rewind: Rewind) -> SessionHead:
        """`SessionStore.rewind` under this lease, which is over if it succeeds."""
        return await self._write(self._store.rewind, rewind)

    async def begin_turn(self, start: TurnStart, *, max_records: int) -> TurnRecord | None:
        """`record` of a turn that begins under this lease."""
        self.record = await self._store.begin_turn(self._lease, start, max_records=max_records, ends_abandoned=False)
        self._due = DueTurn(start, max_records) if self.record is None else None
        return self.record

    async def begin_due_turn(self) -> None:
        """Ends the abandoned turn that still stands in the place of this lease's own. Raises NotFound or LeaseLost."""
        if self._due is not None:
            self.record = await self._store.begin_turn(self._lease, self._due.start, max_records=self._due.max_records)
            self._due = None

    async def append_turn(self, turn_id: str, *, index: int, chunk: bytes) -> bool:
        """`SessionStore.append_turn` under this lease, as for the next."""
        return await self._store.append_turn(self._lease, turn_id, index=index, chunk=chunk)

    async def end_turn(self, ended: EndedTurn, *, status: Literal["failed", "cancelled"]) -> None:
        if self._due is not None:  # it has no record: the abandoned one can still be continued
            return
        await self._store.end_turn(self._lease, ended, status=status)

    async def forget_turn(self, turn_id: str) -> None:
        await self._store.forget_turn(self._lease, turn_id)

    async def is_cancel_wanted(self, turn_id: str) -> bool:
        """Whether somebody asked for the end of the running turn."""
        record = await self.read_turn(turn_id)
        return record is not None and (record.is_cancel_wanted or record.status == "cancelled")

    async def read_turn(self, turn_id: str) -> TurnRecord | None:
        """Its record without request and chunks."""
        lease = self._lease
        return await self._store.get_turn(lease.key, turn_id=turn_id, first_chunk=NO_CHUNKS, with_request=False)

    async def give_back(self) -> None:
        """The session is free when this returns, as far as it depends on us. Idempotent."""
        await self._stop_renewing()
        if self._is_over:
            return
        self._is_over = True
        try:
            await self._store.release(self._lease)
        except NsmError as error:
            logger.warning("the lease on session %s was not released: %s", self._lease.session_id, error)

    async def _write(self, write: Callable[[Lease, Change], Awaitable[SessionHead]], change: Change) -> SessionHead:
        await self._stop_renewing()  # a renewal that comes after the commit would look like a lost lease
        try:
            await self.begin_due_turn()
            head = await write(self._lease, change)
        except LeaseLost:
            self._is_over = True
            self._metrics.sessions.lease_lost()
            raise
        self._is_over = self.has_written = True
        return head

    def _retention(self, position: int, model_fingerprint: str) -> Retention:
        """The newest snapshot until now may become a retained one."""
        head = self.stored.head
        if head.model_fingerprint != model_fingerprint:
            return NO_RETENTION  # no other model goes on from them
        newest = None if self.stored.damage else head.newest_snapshot
        keep = plan_retention(self.retained, newest, position=position, max_retained=self._max_retained)
        return Retention(keep=keep)

    def _renew_later(self) -> None:
        """A task only when it is time: most turns end before, and their commit waits for none."""
        self._timer = asyncio.get_running_loop().call_later(self._lease_s / RENEWALS_PER_LEASE, self._start_renewing)

    def _start_renewing(self) -> None:
        self._renewing = asyncio.create_task(self._renew())

    async def _stop_renewing(self) -> None:
        self._is_stopping = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._renewing is None:
            return
        self._renewing.cancel()
        await asyncio.wait((self._renewing,))
        # The task holds its cancellation, whose traceback holds us and with us the turn's states: megabytes that would
        # stay until the garbage collector looks for cycles.
        self._renewing = None

    async def _renew(self) -> None:
        try:
            self._lease = await self._store.renew(self._lease, lease_s=self._lease_s)
        except LeaseLost as error:
            self._is_over = True
            self._metrics.sessions.lease_lost()
            self._on_lost(error)
            return
        except NsmError as error:  # the store is away: the next renewal, or the commit, will tell
            logger.warning("the lease on session %s was not renewed: %s", self._lease.session_id, error)
        if not self._is_stopping:  # a client library may swallow the cancel that meets it in the middle of a command
            self._renew_later()


class Leases:
    """Takes leases for this process. `lease_s`: how long one holds when its holder is not heard of any more.

    `max_retained`: how many older snapshots a session keeps. `state_format`: see HeldLease. `replica`: the name of this
    process, which heads keep.
    """

    def __init__(
        self,
        store: SessionStore,
        *,
        lease_s: float,
        metrics: Metrics,
        max_retained: int = 0,
        state_format: StateFormat = StateFormat.FP32,
        replica: str = "",
    ) -> None:
        self._store = store
        self._replica = replica
        self._max_retained = max_retained
        self._state_format = state_format
        self._lease_s = lease_s
        self._metrics = metrics
        self._process = uuid.uuid4().hex

    async def take(
        self,
        key: SessionKey,
        *,
        on_lost: Callable[[NsmError], None],
        hot: HotState | None = None,
        start: TurnStart | None = None,
        max_records: int = 1,
    ) -> HeldLease:
        """Raises the errors of `SessionStore.acquire`. `on_lost` is called once, when a renewal finds it gone.

        `hot`: the session's state that this process has. `start`, `max_records`: as for `SessionStore.acquire`.
        """
        holder = f"{self._process}/{random_id()}"
        known = None if hot is None else hot.known
        asked = self._store.acquire(
            key, holder=holder, lease_s=self._lease_s, known=known, start=start, max_records=max_records
        )
        acquiring = asyncio.ensure_future(asked)
        started = time.monotonic()
        try:
            leased = await asyncio.shield(acquiring)
        except SessionBusy:
            self._metrics.sessions.lease_asked(time.monotonic() - started, is_busy=True)
            raise
        except asyncio.CancelledError:
            with contextlib.suppress(NsmError):  # nobody would give it back: the session would be busy until it expires
                await self._store.release((await acquiring).lease)
            raise
        self._metrics.sessions.lease_asked(time.monotonic() - started, is_busy=False)
        return HeldLease(
            self._store,
            leased,
            lease_s=self._lease_s,
            metrics=self._metrics,
            max_retained=self._max_retained,
            state_format=self._state_format,
            on_lost=on_lost,
            hot=None if hot is None else hot.snapshot,
            border=None if hot is None else hot.border,
            replica=self._replica,
            due=None if start is None else DueTurn(start, max_records),
        )
