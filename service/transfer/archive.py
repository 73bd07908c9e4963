"""Sessions, documents and named states as one stream of bytes, written and read one at a time.

Byte format 2, all integers little endian:

    magic "NSMARCH" and a zero byte, 4 bytes format version
    one entry a session:
        4 bytes  "SESS"
        4 bytes  H, length of the entry's header
        8 bytes  F, length of the session file
        H        header: JSON, ASCII: tenant, created_at
        F        the session, as service/transfer/session_file.py writes it
        16       checksum over the entry before this: XXH3-128
    one entry a document:
        as above, with "RECD" for "SESS": the header is tenant, kind and id, and the JSON document stands for the file
    one entry a version of a named state:
        as above, with "STAT": the header has the state's fields, newest and has_text; for the file stand 8 bytes with
        the length of the text, the text in UTF-8, and the state as a session file
    the end:
        4 bytes  "END" and a zero byte
        8 bytes  number of entries
        16       checksum over the checksums of all entries and this number

Format 1 is the same without named states.
"""

from __future__ import annotations

import dataclasses
import json
import struct
from collections.abc import Callable, Iterator
from typing import IO, Any, get_args

from nsm_core.errors import InvalidRequest, NsmError
from nsm_core.hashing import CHECKSUM_BYTES, checksum, new_checksum
from service.state.copies import SessionCopy
from service.stores.records.base import Kind, OwnedRecord
from service.stores.sessions.base import SessionHead
from service.transfer.session_file import read_file, stored_snapshot, write_file
from service.transfer.state_copies import StateCopy, decode_state, encode_state

MAGIC = b"NSMARCH\0"
FORMAT_VERSION = 2
_READABLE = (1, FORMAT_VERSION)
NO_TOKENIZER = "none"  # of an empty session: it has no token that a tokenizer would have to explain

_START = struct.Struct("<8sI")
_ENTRY = struct.Struct("<4sIQ")
_COUNT = struct.Struct("<Q")
_SESSION_TAG, _DOCUMENT_TAG, _STATE_TAG, _END_TAG = b"SESS", b"RECD", b"STAT", b"END\0"
_READ_BYTES = 1024 * 1024  # at once: a damaged length must not ask for all memory


Content = SessionCopy | OwnedRecord | StateCopy


class ArchiveDamaged(InvalidRequest):
    """The bytes are not a whole backup: cut off, changed, or of another format. `num_sessions` were good before."""

    def __init__(self, reason: str, *, num_sessions: int) -> None:
        super().__init__(f"this is no backup that can be used: {reason}", code="invalid_backup")
        self.num_sessions = num_sessions


@dataclasses.dataclass(frozen=True, slots=True)
class ArchiveEntry:
    """One session, document or named state, checked, and how many bytes of the archive have been read with it."""

    content: Content
    num_bytes_read: int


class ArchiveWriter:
    """Writes to `out`; an archive is whole after `finish`."""

    def __init__(self, out: IO[bytes]) -> None:
        self._out = out
        self._num_entries = 0
        self._checksum = new_checksum()  # of the entries' checksums
        out.write(_START.pack(MAGIC, FORMAT_VERSION))

    def add(self, copy: SessionCopy) -> None:
        """Raises SnapshotCorrupt or InvalidRequest, and writes nothing, for a session that could not be read again."""
        raw = write_file(copy, tokenizer_fingerprint=NO_TOKENIZER)
        read_file(raw)  # a faulty session must be found now, not when the backup is needed
        self._write(_SESSION_TAG, {"tenant": copy.head.tenant, "created_at": copy.head.created_at}, raw)

    def add_document(self, owned: OwnedRecord) -> None:
        fields = {"tenant": owned.tenant, "kind": owned.kind, "id": owned.record_id}
        self._write(_DOCUMENT_TAG, fields, json.dumps(owned.document).encode("ascii"))

    def add_state(self, copy: StateCopy) -> None:
        fields, raw = encode_state(copy)
        self._write(_STATE_TAG, fields, raw)

    def _write(self, tag: bytes, fields: dict[str, Any], raw: bytes) -> None:
        header = json.dumps(fields, sort_keys=True, separators=(",", ":")).encode("ascii")
        entry = _ENTRY.pack(tag, len(header), len(raw)) + header + raw
        entry_checksum = checksum(entry)
        self._out.write(entry + entry_checksum)
        self._checksum.update(entry_checksum)
        self._num_entries += 1

    def finish(self) -> int:
        """The end mark; returns the number of entries."""
        count = _COUNT.pack(self._num_entries)
        self._checksum.update(count)
        self._out.write(_END_TAG + count + self._checksum.digest())
        return self._num_entries


def read_archive(file: IO[bytes]) -> Iterator[ArchiveEntry]:
    """Sessions, documents and states in their order, each checked before it is given.

    Raises ArchiveDamaged where the good part ends.
    """
    reader = _Reader(file)
    reader.require_start()
    while (entry := reader.next_entry()) is not None:
        yield entry


class _Reader:
    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._num_sessions = self._num_entries = 0
        self._num_bytes = 0
        self._checksum = new_checksum()  # of the entries' checksums

    def require_start(self) -> None:
        magic, version = _START.unpack(self._take(_START.size))
        self._require(magic == MAGIC, "it does not begin with the magic bytes")
        self._require(
            version in _READABLE, f"format version {version}, this build reads versions 1 and {FORMAT_VERSION}"
        )

    def next_entry(self) -> ArchiveEntry | None:
        """None at the end, after it was found to be the right one."""
        tag = self._take(len(_END_TAG))
        if tag == _END_TAG:
            self._require_end()
            return None
        self._require(tag in _PARSERS, "there is no session where the next one should be")
        prefix = tag + self._take(_ENTRY.size - len(tag))
        _, header_bytes, file_bytes = _ENTRY.unpack(prefix)
        header, raw = self._take(header_bytes), self._take(file_bytes)
        entry_checksum = self._take(CHECKSUM_BYTES)
        self._require(entry_checksum == checksum(prefix, header, raw), "a session's checksum does not match")
        content = self._parse(tag, header, raw)
        self._checksum.update(entry_checksum)
        self._num_entries += 1
        self._num_sessions += tag == _SESSION_TAG
        return ArchiveEntry(content, self._num_bytes)

    def _parse(self, tag: bytes, header: bytes, raw: bytes) -> Content:
        try:
            return _PARSERS[tag](json.loads(header), raw)
        except (NsmError, ValueError, TypeError, KeyError) as error:
            raise self._damaged(str(error)) from error

    def _require_end(self) -> None:
        count = self._take(_COUNT.size)
        self._checksum.update(count)
        self._require(self._take(CHECKSUM_BYTES) == self._checksum.digest(), "the checksum at its end does not match")
        self._require(_COUNT.unpack(count) == (self._num_entries,), "sessions are missing")
        self._require(not self._file.read(1), "it goes on after its end")

    def _take(self, num_bytes: int) -> bytes:
        parts, missing = [], num_bytes
        while missing:
            part = self._file.read(min(missing, _READ_BYTES))
            self._require(bool(part), f"it was cut off after {self._num_bytes} bytes")
            parts.append(part)
            missing -= len(part)
            self._num_bytes += len(part)
        return b"".join(parts)

    def _require(self, condition: bool, reason: str) -> None:
        if not condition:
            raise self._damaged(reason)

    def _damaged(self, reason: str) -> ArchiveDamaged:
        return ArchiveDamaged(reason, num_sessions=self._num_sessions)


def _copy_of(fields: dict[str, Any], raw: bytes) -> SessionCopy:
    file = read_file(raw)
    snapshot = stored_snapshot(raw)  # as it was stored: packed or not
    header, created_at = file.header, float(fields["created_at"])
    head = SessionHead(
        tenant=str(fields["tenant"]),
        session_id=header.session_id,
        version=header.version,
        position=header.position,
        created_at=created_at,
        updated_at=created_at,
        model_fingerprint=header.model_fingerprint,
        metadata=header.metadata,
        num_log_tokens=len(file.log_ids),
        snapshot_bytes=len(snapshot or b""),
        ttl_s=header.ttl_s,
        expires_at=None,
        forked_from=header.forked_from,
        snapshot_version=header.snapshot_version,
        snapshot_position=header.snapshot_position,
        tokenizer_fingerprint=header.tokenizer_fingerprint if file.log_ids else "",
        numerics=header.numerics,
        energy_joules=header.energy_joules,
    )
    return SessionCopy(head=head, snapshot=snapshot, log_ids=file.log_ids, marks=header.marks)


def _document_of(fields: dict[str, Any], raw: bytes) -> OwnedRecord:
    kind, document = fields["kind"], json.loads(raw)
    if kind not in get_args(Kind) or not isinstance(document, dict):
        raise ValueError(f"a document of kind {kind!r}, which this build does not know")
    return OwnedRecord(tenant=str(fields["tenant"]), kind=kind, record_id=str(fields["id"]), document=document)


_PARSERS: dict[bytes, Callable[[dict[str, Any], bytes], Content]] = {
    _SESSION_TAG: _copy_of,
    _DOCUMENT_TAG: _document_of,
    _STATE_TAG: decode_state,
}
