"""The refusals of all session stores."""

from __future__ import annotations

from nsm_core.errors import LeaseLost, LogCorrupt, NotFound, SessionBusy, StateMismatch, VersionConflict
from service.messages import quoted
from service.stores.sessions.base import Lease, SessionHead

MAX_RETRY_AFTER_S = 1.0  # of a busy session: a turn takes about that long


class OtherModel(StateMismatch):
    """A turn would begin on a session whose text another model made. `head`: of the session."""

    def __init__(self, head: SessionHead) -> None:
        super().__init__(f"session {head.session_id!r} was made by another model")
        self.head = head


def not_found(session_id: str) -> NotFound:
    """The same answer for an id that never was, is deleted, or is another tenant's."""
    return NotFound(f"session {quoted(session_id)} does not exist", param="session_id", code="session_not_found")


def session_expired(session_id: str) -> NotFound:
    """The answer for an id that the store remembers: its TTL ran out."""
    return NotFound(
        f"session {quoted(session_id)} has expired: its ttl_s ran out", param="session_id", code="session_expired"
    )


def log_corrupt(head: SessionHead, problem: str) -> LogCorrupt:
    return LogCorrupt(f"the token log of session {head.session_id!r} is damaged: {problem}")


def already_exists(session_id: str) -> VersionConflict:
    return VersionConflict(f"session {session_id!r} exists already", param="id")


def session_busy(session_id: str, remaining_s: float = MAX_RETRY_AFTER_S) -> SessionBusy:
    """`remaining_s`: the rest of the other turn's lease."""
    retry_after_s = max(0.0, min(remaining_s, MAX_RETRY_AFTER_S))
    busy = f"session {session_id!r} is busy: another turn is running; wait for it, or cancel it"
    return SessionBusy(busy, retry_after_s=retry_after_s)


def lease_lost(lease: Lease) -> LeaseLost:
    return LeaseLost(
        f"the lease on session {lease.session_id!r} was lost: another turn took it, or the session was deleted; "
        "nothing of this turn was kept"
    )


def require_version(head: SessionHead, expected_version: int) -> None:
    """The compare of compare-and-set; raises VersionConflict."""
    if head.version != expected_version:
        raise VersionConflict(
            f"session {head.session_id!r} is at version {head.version}, expected_version was {expected_version}"
        )


def require_model(head: SessionHead, model_fingerprint: str) -> None:
    """Raises OtherModel. An empty session may be any model's."""
    if head.num_log_tokens and head.model_fingerprint != model_fingerprint:
        raise OtherModel(head)
