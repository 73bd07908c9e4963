"""Makes an executor for GPUs and checks its kernels, with one line for whatever goes wrong."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TypeVar

import torch

from nsm_core.errors import DeviceUnusable
from nsm_core.execution.base import Executor

logger = logging.getLogger("nsm.execution")

Made = TypeVar("Made", bound=Executor)


def prepared(
    device: torch.device, num_rows: int, make: Callable[[], Made], failed_check: Callable[[Made], str | None]
) -> Made:
    """What `make` makes, if `failed_check` finds nothing.

    Raises DeviceUnusable if the kernels cannot be made on this device, or fail their check there.
    """
    started = time.monotonic()
    logger.info("preparing kernels on %s for %d slots; the first start on a machine compiles them", device, num_rows)
    try:
        executor = make()
        prepared_s = time.monotonic() - started
        reason = failed_check(executor)
    except torch.OutOfMemoryError as error:
        raise DeviceUnusable(f"{device} has too little free memory for {num_rows} slots: lower max_slots") from error
    except Exception as error:  # of the compiler, the driver or a kernel: whatever it is, this device will not do
        raise DeviceUnusable(
            f"the kernels do not run on {device} ({type(error).__name__}: {first_line(error)})"
        ) from error
    if reason is not None:
        raise DeviceUnusable(
            f"the kernels fail their check on {device} ({reason}): set the executor to eager, or the device to cpu"
        )
    checked_s = time.monotonic() - started - prepared_s
    logger.info("the kernels are prepared (%.1f s) and pass their check (%.1f s)", prepared_s, checked_s)
    return executor


def first_line(error: Exception) -> str:
    """The first line of an error's text."""
    return str(error).strip().partition("\n")[0]
