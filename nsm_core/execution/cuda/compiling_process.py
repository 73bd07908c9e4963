"""A process that compiles kernels for a GPU and uses none: see compiling.py.

The first line of its input is the kind of device, each further one a Variant. It answers each of these with a line: an
empty one, or why the kernel did not compile.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from typing import Any

from triton.backends import backends
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from nsm_core.execution.cuda.compiler_key import remember_key
from nsm_core.execution.cuda.compiling import Variant

logger = logging.getLogger("nsm.execution")


class NoDevice:
    """A driver for the compiler: it tells the kind of device, and has none. `utils`: of a real one, which has not
    touched a device yet.
    """

    def __init__(self, target: GPUTarget, utils: Any = None) -> None:
        self._target, self.utils = target, utils

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self._target


def launcher_of(target: GPUTarget) -> Any:
    """Makes what launches a kernel, in C for each signature in some versions of the compiler; None without the device's
    library.
    """
    made = next(each.driver for each in backends.values() if each.compiler.supports_target(target))
    try:
        real = made()
    except Exception as error:  # of any kind, by the compiler's version: then launchers are made at the first launch
        logger.info("launchers are not made ahead: %s: %s", type(error).__name__, error)
        return None
    driver.set_active(NoDevice(target, real.utils))
    return real.launcher_cls


def failure_of(variant: Variant, launcher: Any) -> str:
    """Compiles it, and its launcher. Empty, or the error in one line."""
    try:
        kernel = variant.compile()
        if launcher is not None:
            launcher(kernel.src, kernel.metadata)
    except Exception as error:  # of the compiler: whatever it is, the process that launches the kernel will meet it
        return " ".join(f"{type(error).__name__}: {error}".split())[:500]
    return ""


def main() -> None:
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # the compiler may print
    target = GPUTarget(**json.loads(sys.stdin.readline()))
    remember_key()
    driver.set_active(NoDevice(target))
    launcher = launcher_of(target)
    for line in sys.stdin:
        print(failure_of(Variant(**json.loads(line)), launcher), file=answers, flush=True)


if __name__ == "__main__":
    main()
