"""Control groups of tests' own, with a limit of memory, in either version of Linux's interface."""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

ROOTS = {Path("/sys/fs/cgroup"): "memory.max", Path("/sys/fs/cgroup/memory"): "memory.limit_in_bytes"}


def group_root() -> tuple[Path, str] | None:
    """Where groups may be made, and the name of the file of the limit; None where this process may not."""
    return next(filter(_may_make, ROOTS.items()), None)


def _may_make(where: tuple[Path, str]) -> bool:
    root, limit = where
    probe = root / f"nsm-test-{uuid.uuid4().hex}"
    try:
        probe.mkdir()
    except OSError:
        return False
    try:
        return os.access(probe / limit, os.W_OK)
    finally:
        with contextlib.suppress(OSError):
            probe.rmdir()


@contextlib.contextmanager
def memory_group(max_bytes: int) -> Iterator[Path]:
    """A group whose processes may use so much memory in all; they must have ended by the end."""
    found = group_root()
    assert found is not None
    root, limit = found
    group = root / f"nsm-test-{uuid.uuid4().hex}"
    group.mkdir()
    try:
        (group / limit).write_text(str(max_bytes))
        yield group
    finally:
        _remove(group)


def _remove(group: Path) -> None:
    """A group that a process just left cannot be removed at once."""
    for _ in range(5_000):
        with contextlib.suppress(OSError):
            group.rmdir()
            return
        time.sleep(0.01)
    group.rmdir()


def inside(group: Path, *command: str) -> tuple[str, ...]:
    """The command, run in the group from its first instruction on."""
    return ("sh", "-c", 'echo $$ > "$0" && exec "$@"', str(group / "cgroup.procs"), *command)
