"""Makes an executor for GPUs and checks its kernels, with one line for whatever goes wrong."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol, TypeVar

import torch

from nsm_core.errors import DeviceUnusable
from nsm_core.execution.base import Executor
from nsm_core.execution.cuda.options import CudaOptions
from nsm_core.stage_times import StageTimes

logger = logging.getLogger("nsm.execution")


class Recording(Executor, Protocol):
    """An executor for GPUs that records its launches."""

    @property
    def options(self) -> CudaOptions: ...

    def record_all(self) -> None:
        """Records every size of a batch now, not at its first use."""
        ...


Made = TypeVar("Made", bound=Recording)


def prepared(
    device: torch.device,
    num_rows: int,
    *,
    subject: str,
    make: Callable[[], Made],
    launch: Callable[[Made], None],
    failed_check: Callable[[Made], str | None],
) -> Made:
    """What `make` makes, if `failed_check` finds nothing. `launch`: every kernel that either needs; what it reads and
    writes does not matter. `subject`: what these kernels depend on, beside sources, device and `num_rows`.

    Raises DeviceUnusable if the kernels cannot be made on this device, or fail their check there.
    """
    times = StageTimes()
    logger.info("preparing kernels on %s for %d slots; the first start on a machine compiles them", device, num_rows)
    try:
        executor = make()
        times.ended("states")
        if device.type == "cuda" and executor.options.graphs:
            times.ended(f"{_compile_ahead(lambda: launch(executor), f'{num_rows} {subject}')} kernels compiled")
        executor.record_all()
        times.ended("recorded")
        reason = failed_check(executor)
        times.ended("checked")
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
    logger.info("the kernels are prepared and pass their check: %s", times)
    return executor


def _compile_ahead(launch: Callable[[], None], subject: str) -> int:
    """How many kernels were compiled. Without it a start takes longer, so an error is a warning."""
    from nsm_core.execution.cuda.compiling import compile_ahead  # imports the compiler

    try:
        return compile_ahead(launch, subject=subject)
    except Exception as error:  # of the compiler, whose versions differ; its launches will tell if it is broken
        logger.warning("kernels are compiled at their first launch: %s: %s", type(error).__name__, first_line(error))
        return 0


def first_line(error: Exception) -> str:
    """The first line of an error's text."""
    return str(error).strip().partition("\n")[0]
