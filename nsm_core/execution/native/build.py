"""Compiles the kernels: `python -m nsm_core.execution.native.build`, which `make serve` runs.

A plain shared library with a C interface: no Python headers, no build system, one library for every Python. It is named
after a hash of its sources, so a library of other sources is never loaded, and nothing compiles while a server runs.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from nsm_core.hashing import new_identity

SOURCES = Path(__file__).parent / "src"
LIBRARIES = Path(__file__).parent / "build"
# No contraction of products and sums: where one rounding is meant the kernels say so, and all variants give equal bits
FLAGS = ("-std=c++17", "-fPIC", "-fvisibility=default", "-ffp-contract=off", "-fno-math-errno", "-pthread")
PORTABLE = ("-O2", "-ftree-vectorize")
AVX2 = ("-O3", "-mavx2", "-mfma", "-mf16c")
AVX512 = (*AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni")
AMX = (*AVX512, "-mamx-tile", "-mamx-int8")
OPTIONAL = ("-mamx-tile", "-mamx-int8")  # of GCC 11 and Clang 12; with an older compiler their source is empty
# The options of each source; those with an instruction set of their own are empty on other processors
UNITS = {
    "api.cpp": ("-O2",),
    "decode.cpp": ("-O3",),
    "draw.cpp": ("-O2",),
    "model.cpp": ("-O2",),
    "rwkv7_api.cpp": ("-O2",),
    "rwkv7_model.cpp": ("-O2",),
    "rwkv7_runner.cpp": ("-O2",),
    "runner.cpp": ("-O2",),
    "sharing.cpp": ("-O2",),
    "team.cpp": ("-O2",),
    "kernels_portable.cpp": PORTABLE,
    "kernels_avx2.cpp": AVX2,
    "kernels_amx.cpp": AMX,
    "kernels_avx512.cpp": AVX512,
    "rwkv7_portable.cpp": PORTABLE,
    "rwkv7_avx2.cpp": AVX2,
    "rwkv7_avx512.cpp": AVX512,
}


def library_path() -> Path:
    """Where the library of these sources is, or would be."""
    digest = new_identity()
    digest.update(repr((FLAGS, UNITS, platform.machine())).encode())
    for file in sorted(SOURCES.iterdir()):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return LIBRARIES / f"libnsm-{digest.hexdigest()[:16]}.so"


def has_outdated() -> bool:
    """Whether a library is there, of other sources alone: the code was updated after it was built."""
    return not library_path().exists() and any(LIBRARIES.glob("libnsm-*.so"))


def find_compiler() -> str | None:
    """CXX, or the first of the usual names that is there."""
    return os.environ.get("CXX") or next(filter(shutil.which, ("c++", "g++", "clang++")), None)


def build() -> Path:
    """Compiles the library unless it is there, after a build of another process has ended. Raises RuntimeError with
    what the compiler said.
    """
    target = library_path()
    if target.exists():
        return target
    compiler = find_compiler()
    if compiler is None:
        raise RuntimeError("there is no C++ compiler; Debian has one in the package g++")
    LIBRARIES.mkdir(exist_ok=True)
    with _lock() as is_alone:
        if target.exists():  # the other process made it
            return target
        if is_alone:
            _remove_leftovers()
        _make(compiler, target)
    return target


@contextlib.contextmanager
def _lock() -> Iterator[bool]:
    """Waits until no other process builds. False, without waiting, on a file system that locks no directories."""
    directory = os.open(LIBRARIES, os.O_RDONLY)
    try:
        is_alone = True
        try:
            fcntl.flock(directory, fcntl.LOCK_EX)
        except OSError:
            is_alone = False
        yield is_alone
    finally:
        os.close(directory)  # and so unlocked, as by the end of a process


def _remove_leftovers() -> None:
    """The objects of builds that were killed."""
    for scratch in LIBRARIES.glob(f"{tempfile.gettempprefix()}*"):
        shutil.rmtree(scratch, ignore_errors=True)  # a compiler may have outlived its build and still write there


def _make(compiler: str, target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=LIBRARIES) as scratch, ThreadPoolExecutor() as threads:
        objects = list(threads.map(lambda unit: _compile(compiler, unit, Path(scratch)), UNITS))
        partial = Path(scratch) / target.name
        _run(compiler, "-shared", "-pthread", *map(str, objects), "-o", str(partial))
        os.replace(partial, target)  # whole or not at all
    for other in LIBRARIES.glob("libnsm-*.so"):
        if other != target:
            other.unlink()


def _compile(compiler: str, unit: str, directory: Path) -> Path:
    target = directory / unit.replace(".cpp", ".o")
    options = [option for option in UNITS[unit] if _is_x86() or not option.startswith("-m")]
    options = [option for option in options if option not in OPTIONAL or _knows(compiler, option)]
    _run(compiler, *FLAGS, *options, "-c", str(SOURCES / unit), "-o", str(target))
    return target


@functools.cache
def _knows(compiler: str, option: str) -> bool:
    command = (compiler, option, "-fsyntax-only", "-x", "c++", os.devnull)
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _is_x86() -> bool:
    return platform.machine().lower() in ("x86_64", "amd64")


def _run(*command: str) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed:\n{result.stderr.strip()}")


def main() -> int:
    """Prints the files it made; returns 1 and prints the reason when it made none."""
    try:
        print(f"native kernels: {build().name}")  # noqa: T201
    except (OSError, RuntimeError) as error:
        print(f"native kernels: not built, models run slower: {error}", file=sys.stderr)  # noqa: T201
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
