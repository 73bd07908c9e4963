"""The compiler's hash of its own files, half a gigabyte, which is part of the name of every kernel in its cache."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import triton
from triton import knobs
from triton.runtime import cache

from nsm_core.hashing import identity_of

FILES = Path(triton.__file__).parent
NAME = "compiler-key"  # of a file in the cache
SUFFIXES = (".py", ".so")


def remember_key() -> None:
    """From now on the compiler takes the hash for what it was in an earlier process, if no file of its has another size
    or time since. Else it reads them all, and the next process has it easier.
    """
    parts = [triton.__version__]
    for path in sorted(path for path in FILES.rglob("*") if path.suffix in SUFFIXES):
        about = path.stat()
        parts.append(f"{path} {about.st_size} {about.st_mtime_ns}")
    files, note = identity_of(*parts), Path(knobs.cache.dir) / NAME
    key = _read(note, files)
    if not key:
        key = cache.triton_key()
        with suppress(OSError):  # a cache that cannot be written to remembers nothing
            note.parent.mkdir(parents=True, exist_ok=True)
            note.write_text(f"{files}\n{key}")
    cache.triton_key = lambda: key


def _read(note: Path, files: str) -> str:
    """Empty if there is none for these files."""
    with suppress(OSError, UnicodeDecodeError):
        known, _, key = note.read_text().partition("\n")
        if known == files:
            return key
    return ""
