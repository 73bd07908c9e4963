"""Makes an executor for GPUs and checks its kernels, with one line for whatever goes wrong."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch

from nsm_core.errors import DeviceUnusable
from nsm_core.execution.base import Executor
from nsm_core.execution.cuda.options import CudaOptions
from nsm_core.stage_times import StageTimes

if TYPE_CHECKING:
    from nsm_core.execution.cuda.start_note import StartNote

logger = logging.getLogger("nsm.execution")


class Recording(Executor, Protocol):
    """An executor for GPUs that records its launches."""

    @property
    def options(self) -> CudaOptions: ...

    def record_steps(self) -> None:
        """Records every size of a step now, not at its first use; what else is recorded may wait."""
        ...


Made = TypeVar("Made", bound=Recording)
Checked = TypeVar("Checked")


def prepared(
    device: torch.device,
    num_rows: int,
    *,
    subject: str,
    make: Callable[[], Made],
    launch: Callable[[Made], None],
    failed_check: Callable[[Made], str | None],
    computed: Callable[[Made], str],
) -> Made:
    """What `make` makes, if `failed_check` finds nothing. `launch`: every kernel that either needs; what it reads and
    writes does not matter. `subject`: what these kernels depend on, beside sources, device and `num_rows`.

    `computed`: identity of the bits that steps and prompts give; empty: unknown. Where they are those that an earlier
    start of the same kernels on this device gave when it passed its check, that check holds for this start too.

    Raises DeviceUnusable if the kernels cannot be made on this device, or fail their check there.
    """
    times = StageTimes()
    logger.info("preparing kernels on %s for %d slots; the first start on a machine compiles them", device, num_rows)
    try:
        executor, note = make(), None
        times.ended("states")
        if device.type == "cuda" and executor.options.graphs:
            note = _note_of(f"{_about(device)} {num_rows} {subject}")
            times.ended(f"{_compile_ahead(lambda: launch(executor), note)} kernels compiled")
        executor.record_steps()
        times.ended("recorded")
        reason, how = checked(executor, failed_check, computed, note)
        times.ended(how)
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


def _about(device: torch.device) -> str:
    """The very GPU, and its driver."""
    properties = torch.cuda.get_device_properties(device)
    driver = getattr(torch._C, "_cuda_getDriverVersion", str)()
    return f"{properties.name} {getattr(properties, 'uuid', '')} {driver}"


def _note_of(subject: str) -> StartNote | None:
    # these import the compiler
    from nsm_core.execution.cuda.compiler_key import remember_key
    from nsm_core.execution.cuda.start_note import StartNote

    try:
        remember_key()
        return StartNote.of(subject)
    except Exception as error:  # of the compiler, whose versions differ
        logger.warning("this start leaves no note: %s: %s", type(error).__name__, first_line(error))
        return None


def checked(
    executor: Checked,
    failed_check: Callable[[Checked], str | None],
    computed: Callable[[Checked], str],
    note: StartNote | None,
) -> tuple[str | None, str]:
    """Why the check failed, or None; and how it was made, for the log. See `prepared`."""
    if _computes_as_checked(executor, computed, note):
        return None, "compared with an earlier check"
    reason = failed_check(executor)
    if reason is None and note is not None:
        note.write(computed(executor))
    return reason, "checked"


def _computes_as_checked(executor: Checked, computed: Callable[[Checked], str], note: StartNote | None) -> bool:
    """Whether the bits are those of `note`, with which such an executor has passed its check."""
    before = "" if note is None else note.read()
    if not before:
        return False
    try:
        return computed(executor) == before
    except Exception as error:  # the check will say what is wrong
        logger.warning("the kernels are checked again: %s: %s", type(error).__name__, first_line(error))
        return False


def _compile_ahead(launch: Callable[[], None], note: StartNote | None) -> int:
    """How many kernels were compiled. Without it a start takes longer, so an error is a warning."""
    from nsm_core.execution.cuda.compiling import compile_ahead  # imports the compiler

    try:
        return compile_ahead(launch, note=note)
    except Exception as error:  # of the compiler, whose versions differ; its launches will tell if it is broken
        logger.warning("kernels are compiled at their first launch: %s: %s", type(error).__name__, first_line(error))
        return 0


def first_line(error: Exception) -> str:
    """The first line of an error's text."""
    return str(error).strip().partition("\n")[0]
