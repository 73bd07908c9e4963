"""A response's id used twice: a new session that goes on from the end of an earlier turn of another one."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence

from nsm_core.errors import NotFound
from nsm_core.sampling.params import SEED_BITS
from service.deps import TenantScope
from service.named_states.start_state import StartState, session_from
from service.responses.chain import LogPosition
from service.schemas.sessions import new_session_id
from service.stores.sessions.base import LogMark, NewSession
from service.turns.fork import ForkRequest, fork_session

METADATA = {"made_by": "responses"}  # of sessions that no client asked for


async def create_session(scope: TenantScope, state: StartState | None = None) -> LogPosition:
    """A new session, empty or from `state`. Raises QuotaExceeded."""
    key, fingerprint = scope.session_key(new_session_id()), scope.services.backend.model.fingerprint
    new = NewSession(key=key, model_fingerprint=fingerprint, metadata=METADATA)
    if state is not None:
        seed = secrets.randbits(SEED_BITS)
        new = await asyncio.to_thread(session_from, state, key, seed=seed, metadata=METADATA)
    head = await scope.services.store.create(new)
    return LogPosition(session_id=head.session_id, version=head.version, num_log_tokens=head.num_log_tokens)


async def fork_at(scope: TenantScope, position: LogPosition, *, deadline: float) -> LogPosition:
    """The same position in a new session. Its state is a copy. When the session has moved on, the state is made by
    reading the log from the nearest retained snapshot.

    Raises NotFound when the session's log does not have that position any more, and what `TurnPlan`s raise.
    """
    services = scope.services
    request = ForkRequest(
        source=scope.session_key(position.session_id),
        target=scope.session_key(new_session_id()),
        deadline=deadline,
        find_end=lambda head, marks: _num_log_tokens(marks, position),
        metadata=METADATA,
    )
    head = await fork_session(services.turns, services.backend, services.store, services.tenants, request)
    return LogPosition(session_id=head.session_id, version=head.version, num_log_tokens=head.num_log_tokens)


def _num_log_tokens(all_marks: Sequence[LogMark], position: LogPosition) -> int:
    """Raises NotFound when the log does not have that place any more."""
    marks = [mark for mark in all_marks if mark.version <= position.version]
    if not marks or (marks[-1].version, marks[-1].num_log_tokens) != (position.version, position.num_log_tokens):
        raise NotFound(
            f"session {position.session_id!r} was rewound past version {position.version}",
            code="session_not_found",
        )
    return position.num_log_tokens
