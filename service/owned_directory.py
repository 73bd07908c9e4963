"""A temporary directory that does not outlast its process for long: a later start removes what `kill -9` has left."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

PREFIX = "nsm-"
LOCK_FILE = "owner.lock"


@contextlib.contextmanager
def owned_directory() -> Iterator[Path]:
    """A new directory with a file that this process holds locked. Removes those whose owner is gone first."""
    remove_abandoned(Path(tempfile.gettempdir()))
    with tempfile.TemporaryDirectory(prefix=PREFIX, ignore_cleanup_errors=True) as name:
        directory = Path(name)
        unlocked = directory / f"{LOCK_FILE}.new"
        with unlocked.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            unlocked.rename(directory / LOCK_FILE)  # under its name it is locked from the first moment
            yield directory


def remove_abandoned(parent: Path) -> None:
    """Removes this user's directories there whose owner holds its file no more."""
    for lock in parent.glob(f"{PREFIX}*/{LOCK_FILE}"):
        with contextlib.suppress(OSError):  # another's, gone meanwhile, or locked: its owner lives
            if lock.parent.is_symlink() or lock.parent.stat().st_uid != os.geteuid():
                continue
            with open(lock, opener=_no_link) as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock.parent, ignore_errors=True)


def _no_link(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW)
