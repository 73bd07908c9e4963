"""Steps that fail: what ends with them, their requests or the engine."""

from __future__ import annotations

import logging

import torch

from nsm_core.errors import StepFailed

logger = logging.getLogger("nsm.engine")

# No step has succeeded between them: it is not the requests, which were others each time.
MAX_FAILURES_IN_A_ROW = 5
# What the libraries of an accelerator say when its context is lost; every later call would fail as well.
LOST_DEVICE = ("CUDA error", "Triton Error [CUDA]", "CUBLAS_STATUS_", "CUDNN_STATUS_", "device-side assert")


class StepFailures:
    """Of one engine, told of each of its steps."""

    def __init__(self) -> None:
        self._num_in_a_row = 0

    def forget(self) -> None:
        """A step succeeded."""
        self._num_in_a_row = 0

    def take(self, error: Exception) -> StepFailed:
        """What the requests of a step end with that raised `error`; raises it where the engine is to end as well."""
        self._num_in_a_row += 1
        if shows_lost_device(error) or self._num_in_a_row >= MAX_FAILURES_IN_A_ROW:
            raise error
        logger.error("a step of the engine failed, its requests end", exc_info=error)
        return StepFailed(f"a step of the engine failed with this request in it: {type(error).__name__}")


def shows_lost_device(error: Exception) -> bool:
    """Whether an error says that an accelerator, or the memory it works on, is broken. Running out of it is no such."""
    if isinstance(error, torch.OutOfMemoryError):
        return False
    return isinstance(error, torch.AcceleratorError) or any(text in str(error) for text in LOST_DEVICE)
