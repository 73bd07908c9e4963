"""What a start on a GPU can begin before torch is imported, in a thread that hardly needs the interpreter's lock."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from contextlib import suppress

DRIVER = "libcuda.so.1"


def begin(device: str, *, open_context: Callable[[str], None] | None = None) -> threading.Thread:
    """Opens the context of `cuda`, `cuda:1` or `auto`, whose GPU may be missing: then nothing happens, and nothing is
    logged. Who needs the context later finds it, or waits for it as he would without this. `open_context`: does so.
    """

    def run() -> None:
        with suppress(Exception):  # whatever is wrong here, the start will meet it again and say so
            (open_context or retain_context)(device)

    thread = threading.Thread(target=run, name="nsm-early-start", daemon=True)
    thread.start()
    return thread


def retain_context(device: str) -> None:
    """The context of the GPU that all of this process's libraries share: torch would take half a second for it.

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
