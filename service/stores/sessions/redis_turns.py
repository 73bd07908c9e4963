"""Turn records in the Redis store."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any, Literal

from nsm_core.errors import SnapshotCorrupt
from service.stores.redis.client import Attempt, RedisClient
from service.stores.redis.keys import Keyspace
from service.stores.redis.scripts import TURN_APPEND, TURN_BEGIN, TURN_CANCEL, TURN_END, TURN_GET, Script
from service.stores.sessions.base import SessionHead
from service.stores.sessions.errors import OtherModel, lease_lost, not_found, require_version
from service.stores.sessions.key import SessionKey
from service.stores.sessions.lease import Lease
from service.stores.sessions.redis_fields import MICROSECONDS, StoredHead, decode_head, lease_fields, to_us
from service.stores.sessions.turn_records import EndedTurn, TurnRecord, TurnStart, started, turn_not_found


@dataclasses.dataclass(frozen=True, slots=True)
class RedisTurns:
    """The TurnStore of a Redis store. `on_change` gets the head when the bytes of its records have changed."""

    client: RedisClient
    keys: Keyspace
    on_change: Callable[[StoredHead], None]

    async def begin_turn(
        self, lease: Lease, start: TurnStart, *, max_records: int, ends_abandoned: bool = True
    ) -> TurnRecord | None:
        fields = start_fields(start, max_records, ends_abandoned=ends_abandoned)
        status, *rest = await self._under(lease, TURN_BEGIN, *fields)
        if status == b"turn":
            return _record_of(rest, lease.session_id)
        stored = self._head(lease, rest[0])
        require_begun(status, start, stored.head)
        if status == b"abandoned":
            return None
        self.on_change(stored)
        return started(start, stored.head.version)

    async def append_turn(self, lease: Lease, turn_id: str, *, index: int, chunk: bytes) -> bool:
        status, *rest = await self._under(lease, TURN_APPEND, turn_id, index, chunk)
        if status == b"gone":
            raise turn_not_found(turn_id)
        is_cancel_wanted, *head = rest
        if head:
            self.on_change(self._head(lease, head[0]))
        return bool(is_cancel_wanted == b"1")

    async def end_turn(self, lease: Lease, ended: EndedTurn, *, status: Literal["failed", "cancelled"]) -> None:
        await self._end(lease, ended.turn_id, status, ended.result, to_us(ended.ttl_s))

    async def forget_turn(self, lease: Lease, turn_id: str) -> None:
        await self._end(lease, turn_id, "", b"", 0)

    async def _end(self, lease: Lease, turn_id: str, status: str, result: bytes, ttl_us: int) -> None:
        _, *rest = await self._under(lease, TURN_END, turn_id, status, result, ttl_us)
        if rest:
            self.on_change(self._head(lease, rest[0]))

    async def get_turn(
        self,
        key: SessionKey,
        *,
        turn_id: str | None = None,
        identity: str | None = None,
        first_chunk: int = 0,
        with_request: bool = True,
    ) -> TurnRecord | None:
        args = (turn_id or "", identity or "", first_chunk, int(with_request))
        status, *rest = await self._script(TURN_GET, key, *args)
        return None if status == b"none" else _record_of(rest, key.session_id)

    async def cancel_turn(self, key: SessionKey) -> TurnRecord | None:
        status, *rest = await self._script(TURN_CANCEL, key)
        if status == b"not_found":
            raise not_found(key.session_id)
        if status == b"none":
            return None
        if status == b"cancelled":
            self.on_change(_require_head(rest[0], key))
        return _record_of(rest[1:], key.session_id)

    async def _under(self, lease: Lease, script: Script, *args: Any) -> list[Any]:
        """The answer of a script that writes under `lease`. Raises NotFound or LeaseLost."""
        answer = await self._script(script, lease.key, *lease_fields(lease), *args)
        if answer[0] == b"not_found":
            raise not_found(lease.session_id)
        if answer[0] == b"lease_lost":
            raise lease_lost(lease)
        return answer

    async def _script(self, script: Script, key: SessionKey, *args: Any) -> list[Any]:
        keys = self.keys.session(key).all("")

        async def work(attempt: Attempt) -> list[Any]:
            return list(await attempt.script(script, keys, *args))

        return await self.client.call(work)

    @staticmethod
    def _head(lease: Lease, answer: Any) -> StoredHead:
        return _require_head(answer, lease.key)


def start_fields(start: TurnStart, max_records: int, *, ends_abandoned: bool) -> tuple[Any, ...]:
    """A turn that begins, as arguments of scripts."""
    base_version = "" if start.base_version is None else start.base_version
    names = (start.turn_id, start.identity or "", start.digest, base_version, start.model_fingerprint)
    return (*names, int(ends_abandoned), max_records, start.request)


def require_begun(status: bytes, start: TurnStart, head: SessionHead) -> None:
    """Raises the refusal that a script's status tells."""
    if status == b"conflict" and start.base_version is not None:
        require_version(head, start.base_version)
    if status == b"other_model":
        raise OtherModel(head)


def begun_or_found(answer: list[Any], start: TurnStart, head: SessionHead) -> TurnRecord | None:
    """The record in the answer of a script that takes a lease. Raises SnapshotCorrupt."""
    status, *rest = answer
    if status == b"abandoned":
        return None
    return started(start, head.version) if status == b"begun" else _record_of(rest, head.session_id)


def _require_head(answer: Any, key: SessionKey) -> StoredHead:
    stored = decode_head(answer, key)
    if stored is None:
        raise not_found(key.session_id)
    return stored


def _record_of(answer: list[Any], session_id: str) -> TurnRecord:
    raw, request, result, lease_left_us, *chunks = answer
    try:
        fields = json.loads(raw)
        status = fields["status"]
        has_result = status in ("committed", "failed", "cancelled") and bool(result)
        return TurnRecord(
            turn_id=fields["id"],
            identity=fields["identity"] or None,
            digest=fields["digest"],
            base_version=int(fields["base"]),
            status=status,
            request=request,
            result=result if has_result else None,
            chunks=tuple(chunks),
            is_cancel_wanted=fields["cancel"] == "1",
            lease_left_s=int(lease_left_us) / MICROSECONDS,
        )
    except (ValueError, KeyError, TypeError) as error:
        raise SnapshotCorrupt(f"a turn record of session {session_id!r} is damaged") from error
