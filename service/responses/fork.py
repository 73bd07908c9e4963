"""A response's id used twice: a new session that goes on from the end of an earlier turn of another one."""

from __future__ import annotations

import asyncio
import dataclasses
import time
import uuid
from collections.abc import Sequence

from nsm_core.engine.request import EndState
from nsm_core.errors import NotFound, NsmError
from nsm_core.state.quantize import StateFormat
from service.backends.base import InferenceBackend
from service.deps import Services, TenantScope
from service.responses.chain import LogPosition
from service.state.at_position import read_up_to
from service.state.copies import SessionCopy, create_copy, read_copy
from service.state.rebuild import sampled_counts, seed_of
from service.state.resume import ResumedSession, resume
from service.stores.sessions.base import LogMark, NewSession, SessionHead, SessionStore, StoredSession
from service.stores.sessions.errors import not_found

METADATA = {"made_by": "responses"}  # of sessions that no client asked for


def new_session_id() -> str:
    return f"sess_{uuid.uuid4().hex}"


async def create_session(scope: TenantScope) -> LogPosition:
    """A new, empty session. Raises QuotaExceeded."""
    new = NewSession(
        key=scope.session_key(new_session_id()),
        model_fingerprint=scope.services.backend.model.fingerprint,
        metadata=METADATA,
    )
    head = await scope.services.store.create(new)
    return LogPosition(session_id=head.session_id, version=head.version, num_log_tokens=0)


async def fork_at(scope: TenantScope, position: LogPosition, *, deadline: float) -> LogPosition:
    """The same position in a new session. Its state is a copy. When the session has moved on, the state is made by
    reading the log from the nearest retained snapshot.

    Raises NotFound when the session's log does not have that position any more, and what `TurnPlan`s raise.
    """
    copy = await read_copy(scope.services.store, scope.session_key(position.session_id))
    if copy.head.version != position.version:
        with scope.services.tenants.enter(scope.tenant):
            copy = await _cut(scope.services, copy, position, deadline=deadline)
    head = await create_copy(
        scope.services.store,
        copy,
        scope.session_key(new_session_id()),
        metadata=METADATA,
        ttl_s=copy.head.ttl_s,
        forked_from=f"{position.session_id}@{copy.head.position}",
    )
    return LogPosition(session_id=head.session_id, version=head.version, num_log_tokens=head.num_log_tokens)


async def _cut(services: Services, copy: SessionCopy, position: LogPosition, *, deadline: float) -> SessionCopy:
    """The session as it was at `position`; the last token of its log may wait to be read, as after a rewind."""
    marks = tuple(mark for mark in copy.marks if mark.version <= position.version)
    if not marks or (marks[-1].version, marks[-1].num_log_tokens) != (position.version, position.num_log_tokens):
        raise NotFound(
            f"session {position.session_id!r} was taken back behind version {position.version}",
            code="session_not_found",
        )
    backend = services.backend
    model, tokenizer = backend.model, backend.tokenizer
    # refuses what this model must not read; the state itself is not used
    stored = StoredSession(head=copy.head, snapshot=copy.snapshot)
    await asyncio.to_thread(resume, stored, model=model, tokenizer=tokenizer)
    log_ids = copy.log_ids[: position.num_log_tokens]
    end, rounding = await _state_after(backend, services.store, copy.head, marks, log_ids, deadline=deadline)
    end = dataclasses.replace(end, generated_counts=sampled_counts(log_ids, marks))
    before = dataclasses.replace(copy.head, version=position.version - 1)
    start = ResumedSession(head=before, snapshot=None, model=model, tokenizer=tokenizer, rounding=rounding)
    snapshot = await start.encode_next(
        end, seed=seed_of(marks), created_at=time.time(), state_format=services.state_format
    )
    head = dataclasses.replace(
        copy.head,
        version=position.version,
        position=end.position,
        num_log_tokens=len(log_ids),
        snapshot_bytes=len(snapshot),
        model_fingerprint=model.fingerprint,
    )
    return SessionCopy(head=head, snapshot=snapshot, log_ids=log_ids, marks=marks)


async def _state_after(
    backend: InferenceBackend,
    store: SessionStore,
    head: SessionHead,
    marks: Sequence[LogMark],
    log_ids: tuple[int, ...],
    *,
    deadline: float,
) -> tuple[EndState, StateFormat]:
    """The state at the last of `marks`, whose log is `log_ids`, and its `rounding`."""
    version = marks[-1].version
    retained = [one for one in await store.list_retained(head.key) if one.version <= version]
    if (await store.get(head.key)).created_at != head.created_at:
        raise not_found(head.session_id)
    is_retained = any((one.version, one.position) == (version, len(log_ids)) for one in retained)
    num_fed = len(log_ids) if is_retained or len(log_ids) == 1 else len(log_ids) - 1
    reading = await read_up_to(
        backend,
        store,
        head.key,
        log_ids[:num_fed],
        retained=retained,
        marks=marks,
        request_id=f"fork-{uuid.uuid4().hex}",
        deadline=deadline,
    )
    finished = reading.finished
    if finished.end_state is None:
        raise finished.error or NsmError("the session's log could not be read again")
    pending = log_ids[-1] if num_fed < len(log_ids) else None
    state = finished.end_state.state
    end = EndState(state=state, position=num_fed, pending=pending, new_ids=(), generated_counts={})
    return end, reading.rounding
