"""A lock that the processes of one SQLite file take around their transactions, because it costs little to ask for it.

SQLite's own lock decides. To ask for that one takes a statement and an exception, and eight processes that asked each
millisecond spent more on it than on their turns. The gate is one system call. It is a hint: a transaction without it is
as good, and a process that holds it and does not go on, or that checkpoints, holds nobody up for long.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


class WriteGate:
    """For one connection. The lock is on the write-ahead log, which SQLite itself never locks: no further file is left
    behind, and the system opens the gate when a process ends.
    """

    def __init__(self, database: Path) -> None:
        self._log = database.with_name(f"{database.name}-wal")
        self._descriptor = -1
        self._is_mine = False

    def try_enter(self) -> bool:
        """Whether the gate is this connection's until `leave`; True as well where there is no log yet."""
        if not self._is_mine and self._is_open():
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            self._is_mine = True
        return True

    def leave(self) -> None:
        """Idempotent."""
        if self._is_mine:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            self._is_mine = False

    def close(self) -> None:
        """Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor, self._is_mine = -1, False

    def _is_open(self) -> bool:
        if self._descriptor < 0:
            try:
                self._descriptor = os.open(self._log, os.O_RDONLY)
            except OSError:
                return False
        return True
