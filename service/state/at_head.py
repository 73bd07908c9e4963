"""The state of a session's newest version, for readers that need it as a snapshot: exports, inspection."""

from __future__ import annotations

import asyncio
import dataclasses
import time
import uuid

from nsm_core.engine.request import EndState
from nsm_core.errors import NsmError, SnapshotCorrupt
from nsm_core.state.quantize import StateFormat
from nsm_core.state.snapshot import Snapshot
from service.backends.base import InferenceBackend
from service.state.copies import SessionCopy
from service.state.keeper import StateKeeper
from service.state.prefill import read_on
from service.state.resume import ResumedSession, resume
from service.stores.sessions.base import SessionHead, StoredSession


async def with_head_state(
    backend: InferenceBackend, keeper: StateKeeper | None, stored: StoredSession, *, deadline: float
) -> StoredSession:
    """`stored` with the snapshot of its head: from memory, or read from the log after the stored one. As it is where
    that cannot be: of another model, lost, or of an empty session.

    `keeper`: None in a process without turns. `deadline`: a `time.monotonic()` reading. Raises what
    `InferenceBackend.submit` raises, and the engine's error.
    """
    head = stored.head
    if head.has_snapshot_at_head:
        return stored
    snapshot = None if keeper is None else await _retained(keeper, head)
    if snapshot is None:
        found = await asyncio.to_thread(resume, stored, model=backend.model, tokenizer=backend.tokenizer)
        if not isinstance(found, ResumedSession):
            return stored
        state_format = StateFormat.FP32 if keeper is None else keeper.state_format
        snapshot = await _read_tail(backend, found, deadline=deadline, state_format=state_format)
        if keeper is not None:
            keeper.offer(head, snapshot)
    raw = await asyncio.to_thread(snapshot.encode)
    at_head = dataclasses.replace(
        head, snapshot_version=head.version, snapshot_position=head.position, snapshot_bytes=len(raw)
    )
    return StoredSession(head=at_head, snapshot=raw)


async def copy_with_head_state(
    backend: InferenceBackend, keeper: StateKeeper | None, copy: SessionCopy, *, deadline: float
) -> SessionCopy:
    """The same of a copy."""
    stored = StoredSession(head=copy.head, snapshot=copy.snapshot, tail=copy.tail)
    complete = await with_head_state(backend, keeper, stored, deadline=deadline)
    return dataclasses.replace(copy, head=complete.head, snapshot=complete.snapshot)


async def _retained(keeper: StateKeeper, head: SessionHead) -> Snapshot | None:
    hot = await keeper.find(head.key)
    return await keeper.fetch(hot) if hot is not None and hot.known == (head.created_at, head.version) else None


async def _read_tail(
    backend: InferenceBackend, start: ResumedSession, *, deadline: float, state_format: StateFormat
) -> Snapshot:
    head = start.head
    if start.seed is None:
        raise SnapshotCorrupt(f"the token log of session {head.session_id!r} has no seed")
    request_id = f"state-{uuid.uuid4().hex}"
    finished = await read_on(
        backend,
        start.fed_ids,
        request_id=request_id,
        deadline=deadline,
        resume=start.resume_state(),
        sampled_at=start.sampled_at,
    )
    if finished.end_state is None:
        raise finished.error or NsmError("the session's log could not be read again")
    end = EndState(
        state=finished.end_state.state,
        position=head.position,
        pending=start.pending_id,
        new_ids=(),
        generated_counts=start.generated_counts,
    )
    before = dataclasses.replace(start, head=dataclasses.replace(head, version=head.version - 1))
    return before.next_snapshot(end, seed=start.seed, created_at=time.time(), state_format=state_format)
