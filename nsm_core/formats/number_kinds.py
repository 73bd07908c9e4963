"""How numbers are stored in model files, and how they become tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt
import torch

from nsm_core.formats import blocks

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


@dataclasses.dataclass(frozen=True, slots=True)
class NumberKind:
    """`block` numbers in `num_bytes`. Plain ones have a `dtype`, others `dequantise`: [n, num_bytes] -> [n, block]."""

    name: str
    block: int
    num_bytes: int
    dtype: torch.dtype | None = None
    dequantise: Callable[[Bytes], Floats] | None = None

    @property
    def weight_format(self) -> str:
        """The format of this name, or the nearest one that executors know."""
        return {"F64": "fp32", "F32": "fp32", "F16": "fp16", "BF16": "bf16", "U8": "int4"}.get(self.name, "int8")


PLAIN: Mapping[str, NumberKind] = {
    name: NumberKind(name, 1, dtype.itemsize, dtype)
    for name, dtype in (
        ("F64", torch.float64),
        ("F32", torch.float32),
        ("F16", torch.float16),
        ("BF16", torch.bfloat16),
        ("I8", torch.int8),
        ("U8", torch.uint8),  # two numbers of int4 rows, or their steps
    )
}
QUANTISED: Mapping[str, NumberKind] = {
    "Q8_0": NumberKind("Q8_0", 32, 34, dequantise=blocks.dequantise_q8_0),
    "Q4_K": NumberKind("Q4_K", 256, 144, dequantise=blocks.dequantise_q4_k),
    "Q6_K": NumberKind("Q6_K", 256, 210, dequantise=blocks.dequantise_q6_k),
}


def is_finite(values: torch.Tensor) -> bool:
    """By the least and the largest, which are NaN if one number is: many times as fast as a look at each."""
    return values.numel() == 0 or all(bool(bound.isfinite()) for bound in values.aminmax())
