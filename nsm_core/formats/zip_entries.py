"""Where the entries of a zip archive are, as far as PyTorch writes them: stored, not compressed."""

from __future__ import annotations

import dataclasses
import struct

from nsm_core.errors import CheckpointError
from nsm_core.formats.random_access import RandomAccessFile

MAX_DIRECTORY_BYTES = 16 << 20
_MAGIC = b"PK\x03\x04"
_END = struct.Struct("<4s4H2LH")  # end of the central directory
_LOCATOR = struct.Struct("<4sLQL")  # where its 64-bit form is
_END64 = struct.Struct("<4sQ2H2L4Q")
_ENTRY = struct.Struct("<4s4B4HL2L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")
_FULL32 = 0xFFFFFFFF  # the value is in the 64-bit extra field


@dataclasses.dataclass(frozen=True, slots=True)
class ZipEntry:
    """`size` bytes of one stored entry from `offset` of the file on."""

    offset: int
    size: int


def is_zip(file: RandomAccessFile) -> bool:
    return file.size >= _END.size and file.read(0, 4) == _MAGIC


def read_entries(file: RandomAccessFile) -> dict[str, ZipEntry]:
    """The entries by name. Raises CheckpointError that names the file."""
    size, offset = _directory(file)
    if size > MAX_DIRECTORY_BYTES:
        raise CheckpointError(f"{file.path}: the zip archive's directory has {size} bytes")
    raw = file.read(offset, size)
    entries: dict[str, ZipEntry] = {}
    at = 0
    while at + _ENTRY.size <= len(raw) and raw[at : at + 4] == b"PK\x01\x02":
        fields = _ENTRY.unpack_from(raw, at)
        name_len, extra_len, comment_len = fields[12:15]
        name_end = at + _ENTRY.size + name_len
        name = raw[at + _ENTRY.size : name_end].decode("utf-8", "replace")
        entries[name] = _entry(file, name, fields, raw[name_end : name_end + extra_len])
        at = name_end + extra_len + comment_len
    return entries


def _directory(file: RandomAccessFile) -> tuple[int, int]:
    """Size and offset of the central directory; PyTorch writes no comment after it."""
    end = _END.unpack(file.read(file.size - _END.size, _END.size))
    if end[0] != b"PK\x05\x06":
        raise CheckpointError(f"{file.path} is cut short or damaged: the zip archive has no end")
    if end[6] != _FULL32 and end[4] != 0xFFFF:
        return end[5], end[6]
    locator = _LOCATOR.unpack(file.read(file.size - _END.size - _LOCATOR.size, _LOCATOR.size))
    end64 = _END64.unpack(file.read(locator[2], _END64.size))
    if locator[0] != b"PK\x06\x07" or end64[0] != b"PK\x06\x06":
        raise CheckpointError(f"{file.path}: the zip archive's end is damaged")
    return end64[8], end64[9]


def _entry(file: RandomAccessFile, name: str, fields: tuple[int, ...], extra: bytes) -> ZipEntry:
    flags, method, packed, size, header = fields[5], fields[6], fields[10], fields[11], fields[-1]
    wide = iter(_wide_values(extra))
    size, packed, header = (next(wide, _FULL32) if value == _FULL32 else value for value in (size, packed, header))
    if method != 0 or flags & 1 or packed != size:
        raise CheckpointError(f"{file.path}: the entry {name[:80]!r} is compressed or encrypted")
    local = _LOCAL.unpack(file.read(header, _LOCAL.size))
    if local[0] != _MAGIC:
        raise CheckpointError(f"{file.path}: the entry {name[:80]!r} is not where the zip archive's directory says")
    offset = header + _LOCAL.size + local[9] + local[10]
    file.require(offset, size)
    return ZipEntry(offset, size)


def _wide_values(extra: bytes) -> tuple[int, ...]:
    """The 64-bit values of an entry's extra field 1."""
    at = 0
    while at + 4 <= len(extra):
        kind, size = struct.unpack_from("<2H", extra, at)
        if kind == 1:
            body = extra[at + 4 : at + 4 + size]
            return struct.unpack(f"<{len(body) // 8}Q", body[: len(body) // 8 * 8])
        at += 4 + size
    return ()
