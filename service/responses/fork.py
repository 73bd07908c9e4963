"""A response's id used twice: a new session that goes on from the end of an earlier turn of another one."""

from __future__ import annotations

import uuid

from nsm_core.errors import NotFound
from service.deps import Services
from service.responses.chain import LogPosition
from service.state.copies import SessionCopy, create_copy, read_copy
from service.state.earlier import copy_at
from service.stores.sessions.base import NewSession
from service.stores.sessions.key import SessionKey

METADATA = {"made_by": "responses"}  # of sessions that no client asked for


def new_session_id() -> str:
    return f"sess_{uuid.uuid4().hex}"


async def create_session(services: Services, tenant: str) -> LogPosition:
    """A new, empty session. Raises QuotaExceeded."""
    new = NewSession(
        key=SessionKey(tenant, new_session_id()),
        model_fingerprint=services.backend.model.fingerprint,
        metadata=METADATA,
    )
    head = await services.store.create(new)
    return LogPosition(session_id=head.session_id, version=head.version, num_log_tokens=0)


async def fork_at(services: Services, tenant: str, position: LogPosition, *, deadline: float) -> LogPosition:
    """The same position in a new session. Its state is a copy. When the session has moved on, the state is made by
    reading the log from the nearest retained snapshot.

    Raises NotFound when the session's log does not have that position any more, and what `TurnPlan`s raise.
    """
    copy = await read_copy(services.store, SessionKey(tenant, position.session_id))
    if copy.head.version != position.version:
        with services.tenants.enter(tenant):
            copy = await copy_at(
                services.backend,
                services.store,
                copy,
                _num_log_tokens(copy, position),
                request_id=f"fork-{uuid.uuid4().hex}",
                deadline=deadline,
                state_format=services.state_format,
            )
    head = await create_copy(
        services.store,
        copy,
        SessionKey(tenant, new_session_id()),
        metadata=METADATA,
        ttl_s=copy.head.ttl_s,
        forked_from=f"{position.session_id}@{copy.head.position}",
    )
    return LogPosition(session_id=head.session_id, version=head.version, num_log_tokens=head.num_log_tokens)


def _num_log_tokens(copy: SessionCopy, position: LogPosition) -> int:
    """Raises NotFound when the log does not have that place any more."""
    marks = [mark for mark in copy.marks if mark.version <= position.version]
    if not marks or (marks[-1].version, marks[-1].num_log_tokens) != (position.version, position.num_log_tokens):
        raise NotFound(
            f"session {position.session_id!r} was taken back behind version {position.version}",
            code="session_not_found",
        )
    return position.num_log_tokens
