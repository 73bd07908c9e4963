"""A session as one file that another installation can read.

All integers little endian:

    offset            bytes  what
    0                 8      magic "NSMSESS" and a zero byte
    8                 4      format version: 1, or 2 where the snapshot is not the state of the newest version
    12                4      H, length of the header
    16                8      L, length of the token log
    24                8      S, length of the snapshot; 0 for none
    32                H      header: JSON, ASCII, sorted keys, no blanks; see FileHeader
    32 + H            L      token log: 4 bytes an id
    32 + H + L        S      snapshot, in its own format (nsm_core/state/snapshot.py)
    32 + H + L + S    16     checksum over everything before: XXH3-128
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import struct
from collections.abc import Mapping
from typing import Any, Literal, NoReturn

from nsm_core.errors import InvalidRequest, SnapshotCorrupt
from nsm_core.hashing import CHECKSUM_BYTES, checksum
from nsm_core.sampling.counts import MAX_TOKEN_COUNT
from nsm_core.state.snapshot import Snapshot, verify
from service.state.copies import SessionCopy
from service.stores.sessions.base import LogMark
from service.stores.sessions.codec import decode_ids, encode_ids

MAGIC = b"NSMSESS\0"
FORMAT_VERSION, LOG_FORMAT_VERSION = 1, 2

# The first id in the log of a state that was trained: it stands for the start-of-text token, and is no tokenizer's, so
# that nothing can make such a state again from its log and lose the training.
TUNED_ID = 2**32 - 1

_PREFIX = struct.Struct("<8sIIQQ")
_LOG_FIELDS = ("snapshot_version", "snapshot_position", "numerics", "energy_joules")
_MARK_FIELDS = ("version", "num_log_tokens", "num_sampled", "seed")
_ORIGIN = re.compile(r"[A-Za-z0-9_-]{1,64}@[0-9]{1,19}")
_MAX_COUNT = MAX_TOKEN_COUNT // 2  # versions and counts go on from here: numbers of JSON and Lua end there
_MAX_SEED = 2**64 - 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FileHeader:
    """The session's position when it was written, and the models that may read it. Fields as in SessionHead.

    Metadata and TTL are only known to be JSON: whoever makes a session of them checks them like a client's. The last
    four are in files of format 2 alone.
    """

    session_id: str
    model_fingerprint: str
    tokenizer_fingerprint: str
    version: int
    position: int
    metadata: Mapping[str, str]
    ttl_s: float | None
    forked_from: str | None
    marks: tuple[LogMark, ...]
    snapshot_version: int = 0
    snapshot_position: int = 0
    numerics: str = ""
    energy_joules: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SessionFile:
    """A file's content, all of it checked against each other. `snapshot`: the session's newest, None without one."""

    header: FileHeader
    log_ids: tuple[int, ...]
    snapshot: Snapshot | None

    @property
    def is_tuned(self) -> bool:
        """Whether the state began as one that was trained: its log does not lead to it."""
        return self.log_ids[:1] == (TUNED_ID,)


def write_file(copy: SessionCopy, *, tokenizer_fingerprint: str) -> bytes:
    """`tokenizer_fingerprint` is used where nothing in the session tells it. Raises SnapshotCorrupt."""
    head, snapshot = copy.head, copy.snapshot or b""
    tokenizer_fingerprint = head.tokenizer_fingerprint or tokenizer_fingerprint
    if snapshot:
        tokenizer_fingerprint = Snapshot.decode(snapshot).header.tokenizer_fingerprint
    header = FileHeader(
        session_id=head.session_id,
        model_fingerprint=head.model_fingerprint,
        tokenizer_fingerprint=tokenizer_fingerprint,
        version=head.version,
        position=head.position,
        metadata=head.metadata,
        ttl_s=head.ttl_s,
        forked_from=head.forked_from,
        marks=copy.marks,
        snapshot_version=head.snapshot_version,
        snapshot_position=head.snapshot_position,
        numerics=head.numerics,
        energy_joules=head.energy_joules,
    )
    return _assemble(header, copy.log_ids, snapshot, is_at_head=head.has_snapshot_at_head)


def stored_snapshot(raw: bytes) -> bytes | None:
    """The bytes of the snapshot in a file that `read_file` accepts, packed or not; None without one."""
    *_, num_bytes = _PREFIX.unpack_from(raw)
    return raw[-CHECKSUM_BYTES - num_bytes : -CHECKSUM_BYTES] or None


def encode_file(file: SessionFile) -> bytes:
    """The inverse of `read_file`."""
    snapshot, version = file.snapshot, file.header.version
    if snapshot is None:
        return _assemble(file.header, file.log_ids, b"", is_at_head=version == 0)
    return _assemble(file.header, file.log_ids, snapshot.encode(), is_at_head=snapshot.header.version == version)


def _assemble(header: FileHeader, log_ids: tuple[int, ...], snapshot: bytes, *, is_at_head: bool) -> bytes:
    version = FORMAT_VERSION if is_at_head or not log_ids else LOG_FORMAT_VERSION
    fields = {field.name: getattr(header, field.name) for field in dataclasses.fields(header)}
    if version == FORMAT_VERSION:
        fields = {name: value for name, value in fields.items() if name not in _LOG_FIELDS}
    fields["metadata"] = dict(header.metadata)
    fields["marks"] = [[getattr(mark, name) for name in _MARK_FIELDS] for mark in header.marks]
    raw = json.dumps(fields, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")
    log = encode_ids(log_ids)
    body = _PREFIX.pack(MAGIC, version, len(raw), len(log), len(snapshot)) + raw + log + snapshot
    return body + checksum(body)


class _Unusable(Exception):
    """The reason why bytes are no file."""


def read_file(raw: bytes, *, kind: Literal["session", "state"] = "session") -> SessionFile:
    """Raises InvalidRequest, with the reason, for anything that `write_file` would not have written.

    `kind`: what the file is called in the message.
    """
    try:
        return _read(raw)
    except _Unusable as error:
        message = f"this is no {kind} file that can be used: {error}"
        raise InvalidRequest(message, code="invalid_session_file") from error


def _read(raw: bytes) -> SessionFile:
    version, log_start, snapshot_start = _measure(raw)
    header = _parse_header(raw[_PREFIX.size : log_start], has_log_fields=version == LOG_FORMAT_VERSION)
    snapshot_bytes = raw[snapshot_start:-CHECKSUM_BYTES]
    try:
        log_ids = decode_ids(raw[log_start:snapshot_start])
        if snapshot_bytes:
            verify(snapshot_bytes)
        snapshot = Snapshot.decode(snapshot_bytes, is_verified=True) if snapshot_bytes else None
    except SnapshotCorrupt as error:
        raise _Unusable(str(error)) from error
    counts = snapshot.header.sampler.generated_counts if snapshot else {}
    _require(all(count <= _MAX_COUNT for count in counts.values()), f"a token's count is above {_MAX_COUNT}")
    _require_log(header, log_ids)
    if version == LOG_FORMAT_VERSION:
        _require_older_snapshot(header, snapshot, log_ids)
        return SessionFile(header=header, log_ids=log_ids, snapshot=snapshot)
    _require_snapshot(header, snapshot, num_log_tokens=len(log_ids))
    return SessionFile(header=_with_snapshot(header, snapshot), log_ids=log_ids, snapshot=snapshot)


def _with_snapshot(header: FileHeader, snapshot: Snapshot | None) -> FileHeader:
    """A header of format 1 with what its snapshot, which is the newest version's, tells."""
    if snapshot is None:
        return header
    return dataclasses.replace(
        header,
        snapshot_version=snapshot.header.version,
        snapshot_position=snapshot.header.position,
        numerics=snapshot.header.numerics,
        energy_joules=snapshot.header.energy_joules,
    )


def _require(condition: bool, reason: str) -> None:
    if not condition:
        raise _Unusable(reason)


def _measure(raw: bytes) -> tuple[int, int, int]:
    """The format version, where the log and where the snapshot begins. Checks prefix, length and checksum."""
    _require(len(raw) >= _PREFIX.size + CHECKSUM_BYTES, f"{len(raw)} bytes are too few")
    magic, version, header_bytes, log_bytes, snapshot_bytes = _PREFIX.unpack_from(raw)
    _require(magic == MAGIC, "it does not begin with the magic bytes")
    is_known = version in (FORMAT_VERSION, LOG_FORMAT_VERSION)
    _require(is_known, f"format version {version}, this build reads versions 1 and {LOG_FORMAT_VERSION}")
    want = _PREFIX.size + header_bytes + log_bytes + snapshot_bytes + CHECKSUM_BYTES
    _require(len(raw) == want, f"{want} bytes expected, got {len(raw)}")
    _require(checksum(memoryview(raw)[:-CHECKSUM_BYTES]) == raw[-CHECKSUM_BYTES:], "the checksum does not match")
    log_start = _PREFIX.size + header_bytes
    return version, log_start, log_start + log_bytes


def _parse_header(raw: bytes, *, has_log_fields: bool) -> FileHeader:
    try:
        fields = json.loads(raw, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise _Unusable("the header is not JSON") from error
    names = {field.name for field in dataclasses.fields(FileHeader)} - (set() if has_log_fields else {*_LOG_FIELDS})
    _require(isinstance(fields, dict) and set(fields) == names, "the header does not have the fields of its format")
    for name in ("session_id", "model_fingerprint", "tokenizer_fingerprint"):
        _require(isinstance(fields[name], str) and bool(fields[name]), f"{name} is no text")
    for name in ("version", "position", *(_LOG_FIELDS[:2] if has_log_fields else ())):
        _require(_is_count(fields[name]), f"{name} is no count")
    if has_log_fields:
        _require(isinstance(fields["numerics"], str), "numerics is no text")
        joules = fields["energy_joules"]
        _require(isinstance(joules, float) and 0 <= joules < math.inf, "energy_joules is no amount")
    _require(_is_origin(fields["forked_from"]), "forked_from is not <session id>@<position>")
    _require(isinstance(fields["marks"], list), "marks is no list")
    return FileHeader(**{**fields, "marks": tuple(_parse_mark(mark) for mark in fields["marks"])})


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _is_count(value: object, maximum: int = _MAX_COUNT) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= maximum


def _is_origin(value: object) -> bool:
    return value is None or (isinstance(value, str) and _ORIGIN.fullmatch(value) is not None)


def _parse_mark(values: Any) -> LogMark:
    is_mark = isinstance(values, list) and len(values) == len(_MARK_FIELDS)
    _require(is_mark and all(_is_count(value) for value in values[:3]), "a mark is not four numbers")
    is_seed = _is_count(values[3], _MAX_SEED) or (values[3] is None and values[1] == 0)
    _require(is_seed, "a mark's seed is out of range")
    return LogMark(**dict(zip(_MARK_FIELDS, values, strict=True)))


def _require_log(header: FileHeader, log_ids: tuple[int, ...]) -> None:
    """The marks cut the log into turns, from its start to its end."""
    version = num_tokens = 0
    for mark in header.marks:
        is_next = mark.version > version and mark.num_log_tokens >= num_tokens
        _require(is_next and mark.num_sampled <= mark.num_log_tokens - num_tokens, "the marks are not in order")
        version, num_tokens = mark.version, mark.num_log_tokens
    _require((version, num_tokens) == (header.version, len(log_ids)), "the marks do not end where the log ends")
    _require(len(log_ids) - header.position in (0, 1), "the log does not fit the position")


def _require_snapshot(header: FileHeader, snapshot: Snapshot | None, *, num_log_tokens: int) -> None:
    _require((snapshot is None) == (num_log_tokens == 0), "a log comes with a snapshot, an empty log with none")
    if snapshot is None:
        return
    for name in ("session_id", "model_fingerprint", "tokenizer_fingerprint", "version", "position"):
        _require(getattr(snapshot.header, name) == getattr(header, name), f"the snapshot has another {name}")
    num_known = header.position + (snapshot.header.pending_id is not None)
    _require(num_known == num_log_tokens, "the snapshot's pending token is not the log's")


def _require_older_snapshot(header: FileHeader, snapshot: Snapshot | None, log_ids: tuple[int, ...]) -> None:
    """It is the state of an earlier turn of this log."""
    if snapshot is None:
        _require((header.snapshot_version, header.snapshot_position) == (0, 0), "the snapshot is missing")
        return
    found = snapshot.header
    for name in ("session_id", "model_fingerprint", "tokenizer_fingerprint"):
        _require(getattr(found, name) == getattr(header, name), f"the snapshot has another {name}")
    location = (header.snapshot_version, header.snapshot_position)
    _require((found.version, found.position) == location, "the snapshot is of another version or position")
    ends = {mark.version: mark.num_log_tokens for mark in header.marks}
    num_known = found.position + (found.pending_id is not None)
    _require(ends.get(found.version) == num_known, "the snapshot is at no turn's end")
    is_logged = found.pending_id in (None, log_ids[num_known - 1])
    _require(is_logged, "the snapshot's pending token is not the log's")
