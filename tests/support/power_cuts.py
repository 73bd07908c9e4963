"""A disk that loses its power: from a recording of all writes of a process, the files as they may be after any moment.

An honest disk has everything that was written before the last sync of a file. Of what came later, any sectors may be
there. One that lies about its syncs has any sectors of anything; files are removed in order, as by the journal
of a file system.
"""

from __future__ import annotations

import dataclasses
import enum
import os
import random
import shutil
import struct
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

SOURCE = Path(__file__).with_name("disk_recorder.c")
SECTOR_BYTES = 512  # what a disk writes whole or not at all
RECORD = struct.Struct("=cIQQ")
ODDS = (0.0, 0.5, 0.9, 1.0)  # that a sector which nobody synced is there


class Kind(enum.Enum):
    WRITE = b"w"
    TRUNCATE = b"t"
    SYNC = b"s"
    UNLINK = b"u"


@dataclasses.dataclass(frozen=True, slots=True)
class Operation:
    """`name`: of the file, in the recorded directory. `offset`: of a write, or the length of what was truncated."""

    kind: Kind
    name: str
    offset: int
    data: bytes


def build_recorder(directory: Path) -> Path:
    """The library to preload."""
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))))
    library = directory / "disk_recorder.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, SOURCE, "-ldl", "-pthread"], check=True)
    return library


def recorder_environment(library: Path, directory: Path, recording: Path) -> dict[str, str]:
    """For a process whose writes below `directory` are recorded."""
    return {
        **os.environ,
        "LD_PRELOAD": str(library),
        "DISK_RECORDER_DIRECTORY": f"{directory}/",
        "DISK_RECORDER_FILE": str(recording),
    }


def read_recording(path: Path, directory: Path) -> list[Operation]:
    return list(_operations(path.read_bytes(), f"{directory}/"))


def _operations(raw: bytes, below: str) -> Iterator[Operation]:
    at = 0
    while at + RECORD.size <= len(raw):
        kind, path_bytes, offset, num_bytes = RECORD.unpack_from(raw, at)
        at += RECORD.size
        name = raw[at : at + path_bytes].decode().removeprefix(below)
        at += path_bytes
        yield Operation(Kind(kind), name, offset, raw[at : at + num_bytes])
        at += num_bytes


class Disk:
    """The files of one directory, as far as they are safe, and what may still be lost."""

    def __init__(self, *, is_honest: bool) -> None:
        self._is_honest = is_honest
        self._safe: dict[str, bytearray] = {}
        self._pending: dict[str, list[Operation]] = {}

    def apply(self, operation: Operation) -> None:
        name = operation.name
        if operation.kind is Kind.UNLINK:
            self._safe.pop(name, None)
            self._pending.pop(name, None)
        elif operation.kind is not Kind.SYNC:
            self._pending.setdefault(name, []).append(operation)
        elif self._is_honest:
            _carry_out(self._safe.setdefault(name, bytearray()), self._pending.pop(name, ()))

    def lose_power(self, rng: random.Random) -> dict[str, bytes]:
        """The files that are found afterwards, by name; each keeps sectors by odds of its own."""
        files = {}
        for name in sorted({*self._safe, *self._pending}):
            content = bytearray(self._safe.get(name, b""))
            odds = rng.choice(ODDS)
            for operation in self._pending.get(name, ()):
                _carry_out(content, list(_survivors(operation, odds, rng)))
            files[name] = bytes(content)
        return files


def _carry_out(content: bytearray, operations: Sequence[Operation]) -> None:
    for operation in operations:
        end = operation.offset + len(operation.data)
        if len(content) < end:
            content.extend(bytes(end - len(content)))
        if operation.kind is Kind.TRUNCATE:
            del content[operation.offset :]
            content.extend(bytes(operation.offset - len(content)))
        else:
            content[operation.offset : end] = operation.data


def _survivors(operation: Operation, odds: float, rng: random.Random) -> Iterator[Operation]:
    """The sectors of a write that are there after all."""
    if operation.kind is Kind.TRUNCATE:
        if rng.random() < odds:
            yield operation
        return
    start = operation.offset
    end = start + len(operation.data)
    while start < end:
        stop = min(end, (start // SECTOR_BYTES + 1) * SECTOR_BYTES)
        if rng.random() < odds:
            piece = operation.data[start - operation.offset : stop - operation.offset]
            yield dataclasses.replace(operation, offset=start, data=piece)
        start = stop
