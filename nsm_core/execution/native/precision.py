"""How native kernels multiply."""

from __future__ import annotations

import enum

from nsm_core.execution.names import ExecutorName


class Precision(enum.StrEnum):
    """The numbers of large matrices: int8 and int4 are multiplied with int8 activations, fp32 rounds nothing."""

    INT8 = "int8"
    INT4 = "int4"
    FP32 = "fp32"


# The executor of each
EXECUTORS: dict[Precision, ExecutorName] = {
    Precision.INT8: "native",
    Precision.INT4: "native-int4",
    Precision.FP32: "native-fp32",
}
PRECISIONS: dict[ExecutorName, Precision] = {name: precision for precision, name in EXECUTORS.items()}
# With running states in fp16; of NSM models alone
HALF_STATES: dict[ExecutorName, Precision] = {
    "native-fp16-states": Precision.INT8,
    "native-int4-fp16-states": Precision.INT4,
}


def precision_of(name: ExecutorName) -> Precision:
    """Of a native executor. Raises KeyError for another one."""
    return HALF_STATES[name] if name in HALF_STATES else PRECISIONS[name]
