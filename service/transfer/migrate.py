"""Sessions whose states another model made, or that are damaged, made again from their logs under the running model.

Each session is a commit of its own that adds nothing to the log, taken under the session's lease: whatever ends a
migration, sessions are as they were or done, and to run it again goes on where it stopped. One is in memory at a time.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Literal

from nsm_core.engine.request import EndState
from nsm_core.errors import (
    EngineDead,
    LeaseLost,
    NotFound,
    NsmError,
    NumericalError,
    SessionBusy,
    SnapshotCorrupt,
    StateMismatch,
    VersionConflict,
)
from service.backends.base import InferenceBackend
from service.state.prefill import read_again
from service.state.rebuild import LostState, Replay, read_replay
from service.state.resume import ResumedSession, resume
from service.stores.sessions.base import Commit, SessionStore, StoredSession
from service.stores.sessions.key import SessionKey
from service.transfer.damage import NEW_STORE, damage_of
from service.turns.lease import HeldLease, Leases

Migration = Literal[
    "migrated", "repaired", "current", "damaged", "other_tokenizer", "other_damaged", "busy", "gone", "failed"
]


@dataclasses.dataclass(frozen=True, slots=True)
class Migrated:
    """The result for one session.

    `migrated`, `repaired`: made again from `num_log_tokens` tokens, or would be. `current`: nothing to do. `damaged`:
    it could be repaired, which was not asked for. `other_tokenizer`: of a model whose log this one cannot read.
    `other_damaged`: of another model, and damaged, so that nobody knows its tokenizer. `busy`: a turn runs. `failed`:
    for the reason that `error` tells.
    """

    name: SessionKey
    outcome: Migration
    num_log_tokens: int = 0
    error: NsmError | None = None


class Migrator:
    """Brings sessions to the running model, one after the other.

    `is_dry_run`: only tell what would be done. `is_repairing`: also make missing and damaged states again; without it
    only the heads of sessions of the running model are read.
    """

    def __init__(
        self,
        store: SessionStore,
        backend: InferenceBackend,
        leases: Leases,
        *,
        is_dry_run: bool = False,
        is_repairing: bool = False,
    ) -> None:
        self._store = store
        self._backend = backend
        self._leases = leases
        self._is_dry_run = is_dry_run
        self._is_repairing = is_repairing

    async def run(self, names: Sequence[SessionKey]) -> AsyncGenerator[Migrated]:
        """One result for each name, in order. Raises StoreUnavailable, StorageFull or EngineDead; the
        sessions of earlier results are done then.
        """
        for name in names:
            yield await self._migrate(name)

    async def _migrate(self, name: SessionKey) -> Migrated:
        try:
            with damage_of(f"session {name.session_id!r}", remedy=NEW_STORE):
                return await self._try(name)
        except NotFound:
            return Migrated(name, "gone")
        except StateMismatch as error:
            return Migrated(name, "other_tokenizer", error=error)
        except (SessionBusy, LeaseLost, VersionConflict) as error:
            return Migrated(name, "busy", error=error)
        except (SnapshotCorrupt, NumericalError) as error:
            return Migrated(name, "failed", error=error)

    async def _try(self, name: SessionKey) -> Migrated:
        head = await self._store.get(name)
        is_own = head.model_fingerprint == self._backend.model.fingerprint
        if head.num_log_tokens == 0 or (is_own and not self._is_repairing):
            return Migrated(name, "current")
        stored = await self._load(name)
        try:
            found = await self._judge(stored)
        except StateMismatch as error:
            return Migrated(name, "other_tokenizer" if stored.damage is None else "other_damaged", error=error)
        if found is None:
            return Migrated(name, "current")
        outcome: Migration = "migrated" if found.reason == "fingerprint_mismatch" else "repaired"
        if outcome == "repaired" and not self._is_repairing:
            return Migrated(name, "damaged")
        if self._is_dry_run:
            return Migrated(name, outcome, head.num_log_tokens)
        return await self._rebuild(name, outcome)

    async def _load(self, name: SessionKey) -> StoredSession:
        """As `acquire` would give it, without taking the session from a turn."""
        try:
            return await self._store.load(name)
        except SnapshotCorrupt:
            head = await self._store.get(name)
            return StoredSession(head=head, snapshot=None, damage="corrupt")

    async def _judge(self, stored: StoredSession) -> LostState | None:
        """Why the state has to be made again, None if it has not. Raises StateMismatch.

        What stands in the place of a session's state and is not it, which a turn refuses as a fault of the store, is
        damage here: nothing of it is used.
        """
        model, tokenizer = self._backend.model, self._backend.tokenizer
        try:
            found = await asyncio.to_thread(resume, stored, model=model, tokenizer=tokenizer)
        except SnapshotCorrupt:
            lost = dataclasses.replace(stored, snapshot=None, damage="corrupt")
            found = resume(lost, model=model, tokenizer=tokenizer)
        return None if isinstance(found, ResumedSession) else found

    async def _rebuild(self, name: SessionKey, outcome: Migration) -> Migrated:
        held = await self._leases.take(
            name,
            on_lost=lambda error: None,  # the commit will be refused
        )
        try:
            found = await self._judge(held.stored)  # again: a turn may have come in between
            if found is None:
                return Migrated(name, "current")
            replay = await self._read_log(held.stored, found)
            await self._commit(held, replay)
            return Migrated(name, outcome, len(replay.log_ids))
        finally:
            await held.give_back()

    async def _read_log(self, stored: StoredSession, lost: LostState) -> Replay:
        """Raises SnapshotCorrupt when the log is damaged as well."""
        head = stored.head
        replay = await read_replay(self._store, lost, head)
        if head.num_log_tokens - head.position not in (0, 1):
            num_tokens = head.num_log_tokens
            raise SnapshotCorrupt(
                f"the log of session {head.session_id!r} has {num_tokens} tokens, its head is at {head.position}"
            )
        return replay

    async def _commit(self, held: HeldLease, replay: Replay) -> None:
        """The next version: the same position, another model's state of it."""
        head = held.stored.head
        backend = self._backend
        fed, pending = replay.log_ids[: head.position], replay.log_ids[head.position :]
        finished = await read_again(backend, fed, request_id=f"migrate-{head.session_id}", deadline=math.inf)
        if finished.end_state is None:
            raise finished.error or EngineDead("the engine was stopped")
        end = EndState(
            state=finished.end_state.state,
            position=head.position,
            pending=pending[0] if pending else None,
            new_ids=(),
            generated_counts=replay.generated_counts,
        )
        start = ResumedSession(head=head, snapshot=None, model=backend.model, tokenizer=backend.tokenizer)
        commit = Commit(
            expected_version=head.version,
            snapshot=await start.encode_next(
                end, seed=replay.seed, created_at=time.time(), state_format=held.state_format
            ),
            position=head.position,
            model_fingerprint=backend.model.fingerprint,
            new_ids=(),
            num_sampled=0,
            seed=replay.seed,
            tokenizer_fingerprint=backend.tokenizer.fingerprint,
            numerics=backend.model.numerics,
            energy_joules=head.energy_joules,
        )
        await held.commit(commit)
