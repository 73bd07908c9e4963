"""A session's head and marks as Redis keeps them: text fields, times in microseconds."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from nsm_core.errors import LogCorrupt, SnapshotCorrupt, StoreUnavailable
from nsm_core.hashing import CHECKSUM_BYTES
from service.stores.sessions.base import Commit, Lease, LogMark, LogTail, NewSession, Rewind, SessionHead
from service.stores.sessions.codec import TOKEN_BYTES, decode_ids, decoding
from service.stores.sessions.key import SessionKey
from service.stores.sessions.retention import RetainedSnapshot, Retention

MICROSECONDS = 1_000_000
SEAL_BYTES = 8  # letters of a chunk's SHA-1, which only scripts can compute for a chunk that they cut


@dataclasses.dataclass(frozen=True, slots=True)
class RetainedSlot:
    """An older snapshot and the slot, from 1 on, that holds it."""

    slot: int
    snapshot: RetainedSnapshot


@dataclasses.dataclass(frozen=True, slots=True)
class StoredHead:
    """A head with the store's own fields."""

    head: SessionHead
    snapshot_checksum: str
    fence: int
    lease_expires_at: float
    turn_bytes: int  # of the turn records
    retained: tuple[RetainedSlot, ...]

    @property
    def num_bytes(self) -> int:
        """The session's share of its tenant's usage."""
        retained_bytes = sum(slot.snapshot.num_bytes for slot in self.retained)
        return self.head.snapshot_bytes + retained_bytes + TOKEN_BYTES * self.head.num_log_tokens + self.turn_bytes


def to_us(seconds: float) -> int:
    return round(seconds * MICROSECONDS)


def optional_us(seconds: float | None) -> str:
    return "" if seconds is None else str(to_us(seconds))


def checksum_field(snapshot: bytes | None) -> str:
    """A snapshot ends with its checksum. The head repeats it, and so names the bytes that belong to it."""
    return "" if snapshot is None else snapshot[-CHECKSUM_BYTES:].hex()


def encode_metadata(metadata: Mapping[str, str]) -> str:
    return json.dumps(dict(metadata), separators=(",", ":"))


def decode_chunk(chunk: bytes, *, session_id: str) -> bytes:
    """The ids of one chunk of a log; raises LogCorrupt when its seal does not fit."""
    seal, ids = chunk[:SEAL_BYTES], chunk[SEAL_BYTES:]
    if hashlib.sha1(ids, usedforsecurity=False).hexdigest()[:SEAL_BYTES].encode() != seal:
        raise LogCorrupt(f"the token log of session {session_id!r} is damaged: a part of it fails its checksum")
    return ids


def encode_mark(mark: LogMark) -> str:
    seed = "" if mark.seed is None else mark.seed
    return f"{mark.version}:{mark.num_log_tokens}:{mark.num_sampled}:{seed}"


def decode_mark(raw: bytes) -> LogMark:
    """Raises LogCorrupt."""
    with decoding("a mark of a token log", error=LogCorrupt):
        version, num_log_tokens, num_sampled, seed = raw.decode().split(":")
        mark = LogMark(
            version=int(version),
            num_log_tokens=int(num_log_tokens),
            num_sampled=int(num_sampled),
            seed=int(seed) if seed else None,
        )
        if encode_mark(mark).encode() != raw:  # int() also takes spaces, signs and other scripts' digits
            raise ValueError("it is not as it was written")
        return mark


def decode_head(answer: Any, key: SessionKey) -> StoredHead | None:
    """A HGETALL's answer, as RESP3 gives it or a script; None when there is no session.

    Raises StoreUnavailable when it is another session's: an answer that went astray must never be used.
    """
    is_flat = isinstance(answer, list) and len(answer) % 2 == 0
    fields = dict(zip(answer[::2], answer[1::2], strict=True)) if is_flat else answer
    if not isinstance(fields, dict):
        raise StoreUnavailable("the session store gave an unexpected answer")
    if not fields:
        return None
    try:
        stored = _stored_head({name.decode(): value.decode() for name, value in fields.items()})
    except (AttributeError, KeyError, ValueError) as error:
        raise SnapshotCorrupt(f"the head of session {key.session_id!r} is damaged") from error
    if stored.head.key != key:
        raise StoreUnavailable("the session store answered with another session's head")
    return stored


def _stored_head(fields: Mapping[str, str]) -> StoredHead:
    has_snapshot = fields["snapshot_bytes"] != "0"
    head = SessionHead(
        tenant=fields["tenant"],
        session_id=fields["session_id"],
        version=int(fields["version"]),
        position=int(fields["position"]),
        created_at=_seconds(fields["created_us"]),
        updated_at=_seconds(fields["updated_us"]),
        model_fingerprint=fields["model_fingerprint"],
        metadata=MappingProxyType(json.loads(fields["metadata"])),
        num_log_tokens=int(fields["num_log_tokens"]),
        snapshot_bytes=int(fields["snapshot_bytes"]),
        ttl_s=_optional_seconds(fields["ttl_us"]),
        expires_at=_optional_seconds(fields["expires_us"]),
        forked_from=fields["forked_from"] or None,
        # key layout 1 has none of the rest
        snapshot_version=int(fields.get("snapshot_version", fields["version"] if has_snapshot else 0)),
        snapshot_position=int(fields.get("snapshot_position", fields["position"] if has_snapshot else 0)),
        tokenizer_fingerprint=fields.get("tokenizer_fingerprint", ""),
        numerics=fields.get("numerics", ""),
        energy_joules=float(fields.get("energy_joules", 0.0)),
        replica=fields.get("replica", ""),
    )
    return StoredHead(
        head,
        fields["snapshot_checksum"],
        int(fields["fence"]),
        _seconds(fields["lease_us"]),
        int(fields["turn_bytes"]),
        tuple(_retained_slot(entry) for entry in fields["retained"].split(",") if entry),
    )


def lease_fields(lease: Lease) -> tuple[int, int, str]:
    """A lease as arguments of scripts."""
    return to_us(lease.created_at), lease.fence, lease.holder


def _retained_slot(entry: str) -> RetainedSlot:
    slot, version, position, num_bytes = map(int, entry.split(":"))
    return RetainedSlot(slot, RetainedSnapshot(version=version, position=position, num_bytes=num_bytes))


def retention_field(retention: Retention) -> str:
    """The argument of scripts."""
    return ",".join(map(str, retention.keep))


def origin_fields(change: NewSession | Commit | Rewind) -> tuple[str, str, str]:
    """What computed a version, as arguments of scripts."""
    return change.tokenizer_fingerprint, change.numerics, repr(change.energy_joules)


def decode_tail(raw_ids: bytes, raw_marks: Sequence[bytes]) -> LogTail:
    """The log after the newest snapshot, as scripts give it: ids whose seals were checked, marks newest first."""
    return LogTail(ids=decode_ids(raw_ids), marks=tuple(map(decode_mark, reversed(raw_marks))))


def lease_of(stored: StoredHead, holder: str) -> Lease:
    head = stored.head
    return Lease(
        tenant=head.tenant,
        session_id=head.session_id,
        created_at=head.created_at,
        holder=holder,
        fence=stored.fence,
        expires_at=stored.lease_expires_at,
    )


def _seconds(text: str) -> float:
    return int(text) / MICROSECONDS


def _optional_seconds(text: str) -> float | None:
    return _seconds(text) if text else None
