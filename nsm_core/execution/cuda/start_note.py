"""What a start leaves in the compiler's cache for the next start of the same sources, model and device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Self

import torch
import triton
from triton import knobs
from triton.runtime import driver

from nsm_core.hashing import identity_of

SOURCES = Path(__file__).parents[2]
PREFIX = "nsm-"
MOST_NOTES = 16  # in a cache; the oldest go


class StartNote:
    """A file. It exists if the cache has all kernels of such a start. Its text is what the checked kernels computed,
    and empty as long as no check has passed.

    A cache that cannot be read or written to is no error: the next start does without the note.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    @classmethod
    def of(cls, subject: str) -> Self:
        """`subject`: all that the kernels depend on beside the sources, the compiler and the kind of device."""
        parts = [subject, triton.__version__, torch.__version__, str(driver.active.get_current_target())]
        parts += [f"{path} {path.stat().st_size} {path.stat().st_mtime_ns}" for path in sorted(SOURCES.rglob("*.py"))]
        return cls(Path(knobs.cache.dir) / f"{PREFIX}{identity_of(*parts)}")

    @property
    def exists(self) -> bool:
        return self._path.exists()

    def read(self) -> str:
        """The text; empty if there is none."""
        with suppress(OSError, UnicodeDecodeError):
            return self._path.read_text()
        return ""

    def write(self, text: str = "") -> None:
        with suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text(text)
            for path in self._too_old():
                path.unlink(missing_ok=True)

    def _too_old(self) -> Iterator[Path]:
        notes = [path for path in self._path.parent.glob(f"{PREFIX}*") if path.is_file()]
        yield from sorted(notes, key=lambda path: path.stat().st_mtime_ns)[:-MOST_NOTES]
