"""A file that is read at offsets. Nothing of it stays in memory, and a file that was cut is an error, not a signal."""

from __future__ import annotations

import os
import stat
import weakref
from pathlib import Path

from nsm_core.errors import CheckpointError, reason_of

MAX_READ = 1 << 30  # bytes that one call asks the system for: Linux reads at most 2 GiB at once


class RandomAccessFile:
    """Open for as long as somebody holds it. Safe to share between threads. Raises CheckpointError with its name."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # opening a pipe must not wait for a writer
        except (OSError, ValueError) as error:
            raise CheckpointError(f"cannot read {path}: {reason_of(error)}") from error
        weakref.finalize(self, os.close, self._descriptor)
        status = os.fstat(self._descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"{path} is not a file")
        self.size = status.st_size
        self.modified = int(status.st_mtime)  # unix seconds

    def read(self, offset: int, size: int) -> bytes:
        """Exactly `size` bytes."""
        self.require(offset, size)
        buffer = bytearray(size)
        self.read_into(offset, memoryview(buffer))
        return bytes(buffer)

    def read_into(self, offset: int, target: memoryview) -> None:
        """Fills `target`, a view of single bytes."""
        self.require(offset, len(target))
        done = 0
        while done < len(target):
            try:
                count = os.preadv(self._descriptor, [target[done : done + MAX_READ]], offset + done)
            except OSError as error:
                raise CheckpointError(f"cannot read {self.path}: {reason_of(error)}") from error
            if count == 0:
                raise CheckpointError(f"{self.path} became shorter while it was read")
            done += count

    def require(self, offset: int, size: int) -> None:
        """Raises CheckpointError unless the file has `size` bytes from `offset` on."""
        if not (offset >= 0 and size >= 0 and offset + size <= self.size):
            raise CheckpointError(
                f"{self.path} is cut short or damaged: {size} bytes at {offset} are not in a file of {self.size}"
            )
