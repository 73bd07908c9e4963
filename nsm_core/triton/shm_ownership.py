"""What belongs to a process and outlives it when it is killed: a lock tells whether its owner still lives."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

YOUNG_S = 5.0  # the owner of a directory may be about to lock it


class AlreadyOwned(Exception):
    """Another process has it."""


@contextlib.contextmanager
def ownership(path: Path) -> Iterator[None]:
    """Has `path`, an empty file, for this process alone: it goes with the block. Raises Claimed, OSError."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            _lock(descriptor)
            if not _is_at(descriptor, path):  # its last owner took it away between the two
                continue
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
            return
        finally:
            os.close(descriptor)


@contextlib.contextmanager
def own_directory(prefix: str) -> Iterator[Path]:
    """A temporary directory; those of the same prefix whose owners were killed are removed first."""
    for left in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        _remove_unowned(left)
    with tempfile.TemporaryDirectory(prefix=prefix) as name:
        descriptor = os.open(name, os.O_RDONLY)
        try:
            _lock(descriptor)
            yield Path(name)
        finally:
            os.close(descriptor)


def _remove_unowned(directory: Path) -> None:
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:  # no directory, another user's, or just gone
        return
    try:
        found = os.fstat(descriptor)
        if found.st_uid == os.getuid() and time.time() - found.st_mtime > YOUNG_S:
            _lock(descriptor)
            shutil.rmtree(directory, ignore_errors=True)
    except AlreadyOwned:
        pass
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> None:
    """Until the descriptor is closed; the kernel does so when a process ends. Children do not inherit it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise AlreadyOwned from None


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
