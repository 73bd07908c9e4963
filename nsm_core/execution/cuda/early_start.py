"""What a start on a GPU can begin before torch is imported, in a thread that needs little of the interpreter's lock."""

from __future__ import annotations

import ctypes
import importlib
import threading
from collections.abc import Callable
from contextlib import suppress

DRIVER = "libcuda.so.1"
COMPILER = "triton.runtime.cache"


def begin(device: str, *, steps: tuple[Callable[[str], None], ...] | None = None) -> threading.Thread:
    """Begins for `cuda`, `cuda:1` or `auto`, whose GPU may be missing: then nothing happens, and nothing is logged.
    Whoever needs the results later finds them, or waits for them as he would without this.

    `steps`: in order, up to the first that raises.
    """

    def run() -> None:
        with suppress(Exception):  # whatever is wrong here, the start will meet it again and say so
            for step in steps or (open_context, hash_compiler):
                step(device)

    thread = threading.Thread(target=run, name="nsm-early-start", daemon=True)
    thread.start()
    return thread


def open_context(device: str) -> None:
    """The context of the GPU that all of this process's libraries share: torch takes half a second for it.

    Raises OSError without a driver, RuntimeError if the driver has no such GPU.
    """
    driver = ctypes.CDLL(DRIVER)
    _, _, index = device.partition(":")
    handle, context = ctypes.c_int(), ctypes.c_void_p()
    _require(driver.cuInit(0))
    _require(driver.cuDeviceGet(ctypes.byref(handle), int(index or 0)))
    _require(driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), handle))


def _require(status: int) -> None:
    if status:
        raise RuntimeError(f"the driver answers {status}")


def hash_compiler(_device: str) -> None:
    """The compiler's hash of its own files, 0.5 GB, which it asks for before its first kernel, and keeps."""
    importlib.import_module(COMPILER).triton_key()
