"""A response's id used twice: a new session that goes on from the end of an earlier turn of another one."""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
import time
import uuid

from nsm_core.engine.request import EndState, Resume
from nsm_core.errors import NotFound, NsmError
from nsm_core.sampling.params import SEED_BITS
from nsm_core.state.snapshot import Snapshot
from service.continuation import Continuation, resume
from service.copies import SessionCopy, create_copy, read_copy
from service.deps import Services
from service.earlier_states import read_up_to
from service.replay import sampled_counts, seed_of
from service.responses.chain import Place
from service.sessions.base import SessionHead, StoredSession
from service.sessions.records import not_found

METADATA = {"made_by": "responses"}  # of sessions that no client asked for


def new_session_id() -> str:
    return f"sess_{uuid.uuid4().hex}"


async def create_session(services: Services, tenant: str) -> Place:
    """A new, empty session. Raises QuotaExceeded."""
    head = await services.store.create(
        tenant=tenant,
        session_id=new_session_id(),
        model_fingerprint=services.backend.model.fingerprint,
        metadata=METADATA,
    )
    return Place(session_id=head.session_id, version=head.version, num_log_tokens=0)


async def fork_at(services: Services, tenant: str, place: Place, *, deadline: float) -> Place:
    """The same place of a new session. Its state is copied or, when the session has moved on, made by reading the log
    from the nearest older snapshot that it keeps.

    Raises NotFound when the session's log does not have that place any more, and what `TurnPlan`s raise.
    """
    copy = await read_copy(services.store, tenant=tenant, session_id=place.session_id)
    if copy.head.version != place.version:
        with services.tenants.enter(tenant):
            copy = await _cut(services, copy, place, deadline=deadline)
    head = await create_copy(
        services.store,
        copy,
        tenant=tenant,
        session_id=new_session_id(),
        metadata=METADATA,
        ttl_s=copy.head.ttl_s,
        forked_from=f"{place.session_id}@{copy.head.position}",
    )
    return Place(session_id=head.session_id, version=head.version, num_log_tokens=head.num_log_tokens)


async def _cut(services: Services, copy: SessionCopy, place: Place, *, deadline: float) -> SessionCopy:
    """The session as it was at `place`. As after a rewind, the last token of its log waits to be read."""
    marks = tuple(mark for mark in copy.marks if mark.version <= place.version)
    if not marks or (marks[-1].version, marks[-1].num_log_tokens) != (place.version, place.num_log_tokens):
        raise NotFound(
            f"session {place.session_id!r} was taken back behind version {place.version}", code="session_not_found"
        )
    model, tokenizer = services.backend.model, services.backend.tokenizer
    # refuses what this model must not read; the state itself is not used
    stored = StoredSession(head=copy.head, snapshot=copy.snapshot)
    await asyncio.to_thread(resume, stored, model=model, tokenizer=tokenizer)
    log_ids = copy.log_ids[: place.num_log_tokens]
    end = await _state_after(services, copy.head, log_ids, deadline=deadline)
    end = dataclasses.replace(end, generated_counts=sampled_counts(log_ids, marks))
    before = dataclasses.replace(copy.head, version=place.version - 1)
    start = Continuation(head=before, snapshot=None, model=model, tokenizer=tokenizer)
    seed = seed_of(marks)
    if seed is None:
        seed = secrets.randbits(SEED_BITS)
    snapshot = await asyncio.to_thread(lambda: start.next_snapshot(end, seed=seed, created_at=time.time()).encode())
    head = dataclasses.replace(
        copy.head,
        version=place.version,
        position=end.position,
        num_log_tokens=len(log_ids),
        snapshot_bytes=len(snapshot),
        model_fingerprint=model.fingerprint,
    )
    return SessionCopy(head=head, snapshot=snapshot, log_ids=log_ids, marks=marks)


async def _state_after(services: Services, head: SessionHead, log_ids: tuple[int, ...], *, deadline: float) -> EndState:
    """The state after `log_ids`, which a log begins with, from the newest state that is kept of it."""
    kept = await _nearest_kept(services, head, len(log_ids))
    num_read = 0 if kept is None else kept.position
    num_fed = max(num_read, len(log_ids) - 1, 1)
    if kept is not None and num_read == num_fed:
        state = kept.state
    else:
        finished = await read_again(
            services.backend,
            log_ids[num_read:num_fed],
            request_id=f"fork-{uuid.uuid4().hex}",
            deadline=deadline,
            start=kept,
        )
        if finished.end_state is None:
            raise finished.error or NsmError("the session's log could not be read again")
        state = finished.end_state.state
    pending = log_ids[-1] if num_fed < len(log_ids) else None
    return EndState(state=state, position=num_fed, pending=pending, new_ids=(), generated_counts={})


async def _nearest_kept(services: Services, head: SessionHead, num_log_tokens: int) -> Resume | None:
    """The newest kept state that a log of so many tokens has come through, made by the model that runs."""
    key = {"tenant": head.tenant, "session_id": head.session_id}
    for one in reversed(await services.store.list_kept(**key)):
        if one.position > num_log_tokens:
            continue
        raw = await services.store.load_kept(**key, version=one.version)
        if raw is None:
            continue
        snapshot = await asyncio.to_thread(Snapshot.decode, raw, is_verified=True)
        header = snapshot.header
        if header.model_fingerprint == services.backend.model.fingerprint and header.position == one.position:
            return Resume(
                state=snapshot.state,
                position=header.position,
                fingerprint=header.model_fingerprint,
                generated_counts={},
            )
    return None
