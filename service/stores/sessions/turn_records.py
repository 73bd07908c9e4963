"""What a store keeps of the turns themselves: so that a turn is done once, read again, followed, and taken over.

A session has a record for each of its newest turns. While the turn runs its record holds the request and, in small
chunks, the tokens so far; after the end the result. Requests, chunks and results are the gateway's business
(`service/turns/codec.py`): a store keeps them as bytes.
"""

from __future__ import annotations

import dataclasses
from typing import Literal, Protocol

from nsm_core.errors import NotFound
from service.messages import quoted
from service.stores.sessions.key import SessionKey
from service.stores.sessions.lease import Lease

TurnStatus = Literal["running", "committed", "failed", "cancelled"]
REPEATABLE = ("running", "committed")  # a retry of any other turn runs again
ABANDONED_S = 3600.0  # how long the record of a turn stays whose holder was lost


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TurnStart:
    """A turn that is about to run.

    `identity`: what a retry of it would bring again, None when nothing could tell a retry. `digest`: of all that
    determines the result. `base_version`: the version it continues; None: the one the session is at.
    `model_fingerprint`: of the model that is to run it.
    """

    turn_id: str
    identity: str | None
    digest: str
    base_version: int | None
    model_fingerprint: str
    request: bytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EndedTurn:
    """The result of a turn, stored for `ttl_s` seconds from its end on."""

    turn_id: str
    result: bytes
    ttl_s: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TurnRecord:
    """`request` is empty after the end, `chunks` too. `result` is None until then, and for a turn that was abandoned:
    its holder was lost, and something else moved the session on, or somebody cancelled it.

    `lease_left_s`: the rest of the session's lease by the store's clock; 0 when nobody holds it, so that a running
    turn has lost its holder. `is_cancel_wanted`: somebody asked its holder to stop it.
    """

    turn_id: str
    identity: str | None
    digest: str
    base_version: int
    status: TurnStatus
    request: bytes
    result: bytes | None = None
    chunks: tuple[bytes, ...] = ()
    is_cancel_wanted: bool = False
    lease_left_s: float = 0.0


class TurnStore(Protocol):
    """The part of a SessionStore that keeps turn records. They belong to their session and end with it.

    Writers hold the session's lease; a lease that is not the newest one any more is refused (LeaseLost). At most one
    record of a session is running. A commit or rewind of the session ends it: `commit(turn=…)` as committed, anything
    else as failed. What a rewind cuts off is deleted here too: those turns are cancelled, without a result.
    """

    async def begin_turn(
        self, lease: Lease, start: TurnStart, *, max_records: int, ends_abandoned: bool = True
    ) -> TurnRecord | None:
        """A new running record; or, and then nothing changes, the running or committed one with the same identity, or
        one that ended in another way and has the same identity and another digest.

        A running record of another identity was abandoned by a lost holder. It ends as failed; without `ends_abandoned`
        it stays, and the result is None. Of the ended records only the newest are kept: `max_records` with the new one,
        at the latest when it has ended. Survives the death of the process, not a power cut.

        Raises NotFound, LeaseLost, VersionConflict when the session is not at `start.base_version`, or OtherModel when
        it has a text of another model than `start.model_fingerprint`.
        """
        ...

    async def append_turn(self, lease: Lease, turn_id: str, *, index: int, chunk: bytes) -> bool:
        """Adds chunk number `index`, counted from 0; doing so again changes nothing. Whether a cancel is wanted.

        Survives the death of the process, not a power cut. Raises LeaseLost; NotFound when the turn is not running.
        """
        ...

    async def end_turn(self, lease: Lease, ended: EndedTurn, *, status: Literal["failed", "cancelled"]) -> None:
        """The running turn ends without a commit; no error when it is not running. Raises LeaseLost or NotFound."""
        ...

    async def forget_turn(self, lease: Lease, turn_id: str) -> None:
        """The record of a turn that was refused before it began, or whose place a later one takes; nothing for a turn
        without one. Raises LeaseLost or NotFound.
        """
        ...

    async def get_turn(
        self, key: SessionKey, *, turn_id: str | None = None, identity: str | None = None,
        first_chunk: int = 0, with_request: bool = True,
    ) -> TurnRecord | None:  # fmt: skip
        """The record with this id, or the newest running or committed one with this identity, with its chunks from
        `first_chunk` on; None when there is none, or no such session. `with_request`: False leaves `request` empty.
        """
        ...

    async def cancel_turn(self, key: SessionKey) -> TurnRecord | None:
        """Asks the holder of the running turn to stop it, whichever process that is; without a holder it is cancelled
        at once, and a lease that ran out is worth nothing any more. The record as it is then; None when no turn runs.
        Raises NotFound.
        """
        ...


def started(start: TurnStart, version: int) -> TurnRecord:
    """The new record of a turn that continues `version`."""
    return TurnRecord(
        turn_id=start.turn_id,
        identity=start.identity,
        digest=start.digest,
        base_version=version,
        status="running",
        request=start.request,
    )


def turn_not_found(turn_id: str) -> NotFound:
    return NotFound(f"turn {quoted(turn_id, 160)} does not run", code="turn_not_found")
