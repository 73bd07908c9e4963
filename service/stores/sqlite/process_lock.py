"""Liveness of processes that share a SQLite store: the lease of a process that ended may be taken at once.

Each open store holds a lock on a small file of its own beside the database. The kernel releases the lock when the
process ends, however it ends, and keeps it while the process is stopped. So on one machine "ended" is a fact: it needs
no process id, which may be reused, and no clock, and it works between containers that share the directory. (SQLite's
write-ahead log needs one machine anyway.)
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol


class Processes(Protocol):
    """The processes that share a database, by the names of their open stores; `name` is that of this one."""

    name: str

    def is_gone(self, name: str) -> bool:
        """Whether the store that had this name is not open any more: closed, or its process has ended."""
        ...


class SoleProcess:
    """The only one that has its database."""

    name = "sole"

    def is_gone(self, name: str) -> bool:
        return name != self.name


class ProcessLock:
    """The lock of one open store, until `end`. Raises OSError when the file cannot be made."""

    def __init__(self, database: Path) -> None:
        self._database = database
        remove_leftovers(database)
        self.name = uuid.uuid4().hex
        self._descriptor = _lock_new(self._path(self.name))

    def is_gone(self, name: str) -> bool:
        return name != self.name and _remove_if_free(self._path(name))

    def is_alone(self) -> bool:
        """Whether no other store has this database open."""
        remove_leftovers(self._database)
        return list(_files(self._database)) == [self._path(self.name)]

    def end(self) -> None:
        self._path(self.name).unlink(missing_ok=True)
        os.close(self._descriptor)

    def _path(self, name: str) -> Path:
        return self._database.with_name(f"{self._database.name}-open-{name}")


def remove_leftovers(database: Path) -> None:
    """Files that processes left behind that could not close their store."""
    for path in _files(database):
        _remove_if_free(path)


def _files(database: Path) -> Iterator[Path]:
    return database.parent.glob(f"{database.name}-open-*")


def _lock_new(path: Path) -> int:
    while True:
        descriptor = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.stat(path), os.fstat(descriptor)):
                return descriptor
        os.close(descriptor)  # taken for a leftover, and removed, before it was locked


def _remove_if_free(path: Path) -> bool:
    """True when there is no such file, or nobody holds its lock; then it is gone."""
    try:
        descriptor = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink(missing_ok=True)
        return True
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
