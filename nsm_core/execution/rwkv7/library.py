"""RWKV-7's compiled kernels in Python: the functions of `native/src/rwkv7_api.cpp`, by ctypes."""

from __future__ import annotations

import ctypes
import enum
import functools

from nsm_core.execution.native.library import Functions, declare, load_library


class Rwkv7Part(enum.IntEnum):
    """The parts of a layer: `Rwkv7Part` in rwkv7_model.h. Those that belong to no layer are the first one's."""

    RECEPTANCE = 0
    KEY = 1
    VALUE = 2
    OUTPUT = 3
    CHANNEL_KEY = 4
    CHANNEL_VALUE = 5
    HEAD = 6
    DECAY_IN = 7
    DECAY_OUT = 8
    RATE_IN = 9
    RATE_OUT = 10
    VALUE_IN = 11
    VALUE_OUT = 12
    GATE_IN = 13
    GATE_OUT = 14
    FIRST_NORM = 15
    FIRST_NORM_BIAS = 16
    TIME_NORM = 17
    TIME_NORM_BIAS = 18
    CHANNEL_NORM = 19
    CHANNEL_NORM_BIAS = 20
    LAST_NORM = 21
    LAST_NORM_BIAS = 22
    TIME_SHIFT = 23
    CHANNEL_SHIFT = 24
    REMOVAL_KEY = 25
    KEY_RATE = 26
    BONUS = 27
    HEAD_NORM = 28
    HEAD_NORM_BIAS = 29


class Numbers(enum.IntEnum):
    """`Numbers` in rwkv7.h, `INT8_LARGE` and `INT4_LARGE` in rwkv7_model.h: of the large matrices."""

    FP32 = 0
    BF16 = 1
    FP16 = 2
    INT8 = 3
    INT4 = 4


class Rwkv7Shape(ctypes.Structure):
    """`Rwkv7Shape` in rwkv7_model.h."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("vocab_size", "width", "num_layers", "head_size", "hidden")),
        *((name, ctypes.c_int32) for name in ("decay_rank", "rate_rank", "value_rank", "gate_rank", "large")),
        *((name, ctypes.c_float) for name in ("norm_eps", "head_eps")),
    )


_POINTER, _INT = ctypes.c_void_p, ctypes.c_int
_FUNCTIONS: Functions = {
    "nsm_rwkv7_model_new": (_POINTER, (_POINTER, ctypes.c_char_p)),
    "nsm_rwkv7_set_int8": (_INT, (_POINTER, _INT, _INT, _POINTER, _POINTER, _INT, _INT)),
    "nsm_rwkv7_set_int4": (_INT, (_POINTER, _INT, _INT, _POINTER, _POINTER, _POINTER, _POINTER, _INT, _INT)),
    "nsm_rwkv7_set_matrix": (_INT, (_POINTER, _INT, _INT, _POINTER, _POINTER, _INT, _INT)),
    "nsm_rwkv7_set_floats": (_INT, (_POINTER, _INT, _INT, _POINTER, _INT)),
    "nsm_rwkv7_seal": (_INT, (_POINTER,)),
    "nsm_rwkv7_model_free": (None, (_POINTER,)),
    "nsm_rwkv7_runner_new": (_POINTER, (_POINTER, _POINTER, _POINTER, _POINTER, _INT, _INT)),
    "nsm_rwkv7_run": (_INT, (_POINTER, _POINTER, _POINTER, _INT, _POINTER, _POINTER)),
    "nsm_rwkv7_logits": (_INT, (_POINTER, _POINTER, _INT, _POINTER)),
    "nsm_rwkv7_runner_free": (None, (_POINTER,)),
}


@functools.cache
def load_rwkv7_library() -> ctypes.CDLL | None:
    """The library with these functions declared; None as `load_library`."""
    library = load_library()
    if library is not None:
        declare(library, _FUNCTIONS)
    return library
