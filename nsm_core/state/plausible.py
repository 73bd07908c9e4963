"""Whether the numbers of a stored state can be those of any model's. No torch here."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from nsm_core.state.layout import FLOAT, TensorLayout

# Trained models' states stay below some thousands. From here it is far to where products in float32 overflow.
MAX_MAGNITUDE = 1e6


def implausible_tensor(layout: Sequence[TensorLayout], state: bytes) -> str | None:
    """The name of the first tensor with a number that is not finite, or larger than any model's; None if all are good.

    `state`: as it runs (`StateSpec.pack`).
    """
    offset = 0
    for tensor in layout:
        if tensor.dtype == FLOAT:
            values = np.frombuffer(state, "<f4", count=tensor.num_values, offset=offset)
            largest = max(float(values.max()), -float(values.min()))  # NaN where one of them is
            if not largest <= MAX_MAGNITUDE:
                return tensor.name
        offset += tensor.num_bytes
    return None
