"""The turn records of the sessions in this process's memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Literal

from service.stores.sessions.base import SessionHead
from service.stores.sessions.errors import require_version
from service.stores.sessions.turn_records import (
    ABANDONED_S,
    REPEATABLE,
    EndedTurn,
    TurnRecord,
    TurnStart,
    TurnStatus,
    started,
    turn_not_found,
)


@dataclasses.dataclass(slots=True)
class _Turn:
    record: TurnRecord  # without its chunks
    chunks: list[bytes] = dataclasses.field(default_factory=list)
    expires_at: float | None = None  # None while it runs

    @property
    def num_bytes(self) -> int:
        return len(self.record.request) + sum(map(len, self.chunks)) + len(self.record.result or b"")


class MemoryTurns:
    """The records of one session, oldest first. The caller has checked the lease."""

    def __init__(self) -> None:
        self._turns: dict[str, _Turn] = {}

    @property
    def num_bytes(self) -> int:
        return sum(turn.num_bytes for turn in self._turns.values())

    def begin(self, start: TurnStart, head: SessionHead, *, max_records: int, now: float) -> TurnRecord:
        self.remove_expired(now)
        turn = self._turns.get(start.turn_id)
        if turn is None or turn.record.status != "running":
            turn = self._with_identity(start)
        if turn is not None:
            return self._whole(turn)
        if start.base_version is not None:
            require_version(head, start.base_version)
        self.end_running(None, now)
        for turn_id in list(self._turns)[: max(0, len(self._turns) + 1 - max_records)]:
            del self._turns[turn_id]
        record = started(start, head.version)
        self._turns[start.turn_id] = _Turn(record)
        return record

    def append(self, turn_id: str, index: int, chunk: bytes) -> bool:
        turn = self._turns.get(turn_id)
        if turn is None or turn.record.status != "running" or index > len(turn.chunks):
            raise turn_not_found(turn_id)
        if index == len(turn.chunks):
            turn.chunks.append(chunk)
        return turn.record.is_cancel_wanted

    def end(self, ended: EndedTurn, status: Literal["failed", "cancelled"], now: float) -> None:
        turn = self._turns.get(ended.turn_id)
        if turn is not None and turn.record.status == "running":
            self._end(turn, status, ended.result, now + ended.ttl_s)

    def end_running(self, committed: EndedTurn | None, now: float) -> None:
        """The session moved on: by `committed`, or by something else."""
        for turn in self._running():
            if committed is not None and turn.record.turn_id == committed.turn_id:
                self._end(turn, "committed", committed.result, now + committed.ttl_s)
            else:
                self._end(turn, "failed", None, now + ABANDONED_S)

    def drop_results(self, from_version: int) -> None:
        """The session was taken back to `from_version`: what turns made of it since then is deleted."""
        for turn in self._turns.values():
            if turn.record.base_version >= from_version and turn.record.result is not None:
                turn.record = dataclasses.replace(turn.record, status="cancelled", result=None)

    def forget(self, turn_id: str) -> None:
        self._turns.pop(turn_id, None)

    def get(self, turn_id: str | None, identity: str | None, *, now: float, first_chunk: int = 0) -> TurnRecord | None:
        self.remove_expired(now)
        turn = self._turns.get(turn_id or "") or self._repeatable(identity)
        return None if turn is None else self._whole(turn, first_chunk)

    @staticmethod
    def _whole(turn: _Turn, first_chunk: int = 0) -> TurnRecord:
        return dataclasses.replace(turn.record, chunks=tuple(turn.chunks[first_chunk:]))

    def _with_identity(self, start: TurnStart) -> _Turn | None:
        """What the new turn is a retry of, or what its identity was used for before."""
        for turn in reversed(self._turns.values()):
            is_repeatable = turn.record.status in REPEATABLE or turn.record.digest != start.digest
            if start.identity is not None and turn.record.identity == start.identity and is_repeatable:
                return turn
        return None

    def _repeatable(self, identity: str | None) -> _Turn | None:
        for turn in reversed(self._turns.values()):
            if identity is not None and turn.record.identity == identity and turn.record.status in REPEATABLE:
                return turn
        return None

    def cancel(self, *, is_held: bool, now: float) -> TurnRecord | None:
        for turn in self._running():
            if is_held:
                turn.record = dataclasses.replace(turn.record, is_cancel_wanted=True)
            else:
                self._end(turn, "cancelled", None, now + ABANDONED_S)
            return turn.record
        return None

    def remove_expired(self, now: float) -> None:
        for turn_id, turn in list(self._turns.items()):
            if turn.expires_at is not None and now >= turn.expires_at:
                del self._turns[turn_id]

    def _running(self) -> Iterator[_Turn]:
        return (turn for turn in self._turns.values() if turn.record.status == "running")

    @staticmethod
    def _end(turn: _Turn, status: TurnStatus, result: bytes | None, expires_at: float) -> None:
        turn.expires_at, turn.chunks = expires_at, []
        turn.record = dataclasses.replace(turn.record, status=status, request=b"", result=result)
