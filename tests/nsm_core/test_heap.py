from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

# Eight threads allocate at once; then the library tells how many heaps there are.
COUNT_ARENAS = """
import ctypes, re, sys, threading
from nsm_core.heap import limit_arenas

library = ctypes.CDLL(None)
if not hasattr(library, "malloc_info"):
    sys.exit("no glibc")
if sys.argv[1:]:
    limit_arenas(int(sys.argv[1]))
barrier, kept = threading.Barrier(8), []

def allocate():
    barrier.wait()
    kept.append(bytearray(100_000))
    barrier.wait()

threads = [threading.Thread(target=allocate) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
library.open_memstream.restype = ctypes.c_void_p
text, size = ctypes.c_char_p(), ctypes.c_size_t()
stream = ctypes.c_void_p(library.open_memstream(ctypes.byref(text), ctypes.byref(size)))
library.malloc_info(0, stream)
library.fclose(stream)
print(len(re.findall(rb"<heap nr=", text.value)))
"""


def num_arenas(*args: str) -> int:
    done = subprocess.run([sys.executable, "-c", COUNT_ARENAS, *args], capture_output=True, text=True, timeout=60)
    if "no glibc" in done.stderr:
        pytest.skip("this C library has no arenas")
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def test_threads_share_as_many_arenas_as_they_are_told() -> None:
    assert num_arenas() > 2
    assert num_arenas("2") == 2


# A block of 4 MB comes and goes; the last time, how many of its pages the system had to give
FREED = """
import ctypes, resource, sys
from nsm_core.heap import keep_freed_memory, trim_heap

if not hasattr(ctypes.CDLL(None), "mallopt"):
    sys.exit("no glibc")
if sys.argv[1:]:
    keep_freed_memory()
for is_trimmed in (False, False, False, True):
    if is_trimmed:
        trim_heap()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    first, second, third = (number * (4 << 20) for number in (b"1", b"2", b"3"))
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    del first, second, third
"""


def pages_given(*args: str) -> list[int]:
    done = subprocess.run([sys.executable, "-c", FREED, *args], capture_output=True, text=True, timeout=60)
    if "no glibc" in done.stderr:
        pytest.skip("this C library has no such option")
    assert done.returncode == 0, done.stderr
    return [int(line) for line in done.stdout.split()]


def test_freed_memory_stays_with_the_process_until_it_is_trimmed() -> None:
    if pages_given()[2] < 1000:
        pytest.skip("this system gives large pages")
    given = pages_given("kept")
    assert given[2] < 100
    assert given[3] > 1000


FREEZE = """
import gc
from nsm_core.heap import pause_collection, freeze_objects

pause_collection()
kept = [[number] for number in range(1000)]
assert not gc.isenabled()
freeze_objects()
assert gc.isenabled()
print(gc.get_freeze_count(), len(gc.get_objects()), gc.get_threshold()[0])
"""


def test_after_the_start_nothing_old_is_looked_through() -> None:
    done = subprocess.run([sys.executable, "-c", FREEZE], capture_output=True, text=True, timeout=60, check=True)
    frozen, young, threshold = map(int, done.stdout.split())
    assert frozen > 1000
    assert young < 1000 < threshold


GIVE_BACK = """
import ctypes, mmap, pathlib, sys
from nsm_core.heap import SMAPS, give_back_code

if not SMAPS.exists():
    sys.exit("no smaps")
path, size = pathlib.Path(sys.argv[1]), 1 << 20
path.write_bytes(b"1" * size)
file = path.open("rb")
clean = mmap.mmap(file.fileno(), size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
written = mmap.mmap(file.fileno(), size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
assert clean[:] == b"1" * size
written[:] = b"2" * size
address = ctypes.addressof(ctypes.c_char.from_buffer(written))
assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(address), ctypes.c_size_t(size), mmap.PROT_READ) == 0

def resident():
    text = SMAPS.read_text("utf-8", "replace")
    return [int(part.split("Rss:")[1].split()[0]) for part in text.split(str(path))[1:]]

before = resident()
give_back_code()
print(before, resident())
assert clean[:] == b"1" * size and bytes(written[:]) == b"2" * size
"""


def test_only_what_the_files_have_is_let_go(tmp_path: Path) -> None:
    command = [sys.executable, "-c", GIVE_BACK, str(tmp_path / "library")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if "no smaps" in done.stderr:
        pytest.skip("this system does not tell of its mappings")
    assert done.returncode == 0, done.stderr
    before, after = map(json.loads, done.stdout.replace("] [", "]\n[").splitlines())
    assert sorted(before) == [1024, 1024]
    assert sorted(after) == [0, 1024]
