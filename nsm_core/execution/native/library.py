"""The compiled kernels in Python: the functions of `src/api.cpp`, by ctypes."""

from __future__ import annotations

import ctypes
import enum
import functools
import logging
import sys
from collections.abc import Mapping

from nsm_core.execution.native.build import has_outdated, library_path

logger = logging.getLogger("nsm.native")

BUILD = "nsm_core.execution.native.build"

MAX_HEAD_DIM = 256  # kernels.h
MAX_SLOTS = 1024
LANES = 16
PORTABLE = "portable"  # the variant that needs no instruction set extension
_NUM_VARIANTS = 4


class Kind(enum.IntEnum):
    """The kinds of layers: `Kind` in model.h."""

    SLOTS = 0
    ATTENTION = 1
    KEYED = 2


class Part(enum.IntEnum):
    """The parts of a layer: `Part` in model.h."""

    PROJECT = 0
    OUT = 1
    UP = 2
    DOWN = 3
    EMBEDDING = 4
    ROUTER = 5
    ROUTER_BIAS = 6
    MIXER_NORM = 7
    MLP_NORM = 8
    FINAL_NORM = 9
    OUT_NORM = 10
    CONV = 11
    READ_SCALE = 12
    SELECTION_BIAS = 13
    TIMESCALE = 14
    READ_TAPS = 16
    WRITE_TAPS = 17
    SKIP = 18


class Shape(ctypes.Structure):
    """`Shape` in model.h."""

    _fields_ = (
        *(
            (name, ctypes.c_int32)
            for name in ("vocab_size", "d_model", "num_layers", "heads", "slots", "top_k", "taps")
        ),
        *((name, ctypes.c_int32) for name in ("mlp_hidden", "kv_heads", "is_softmax_router", "slot_width", "is_int4")),
        *((name, ctypes.c_float) for name in ("taper", "eps")),
    )


_POINTER, _INT = ctypes.c_void_p, ctypes.c_int


class Slice(ctypes.Structure):
    """`Slice` in decode.h."""

    _fields_ = (
        *((name, _POINTER) for name in ("rows", "ids", "choices", "end_ids", "num_end_ids")),
        *((name, _INT) for name in ("num_rows", "most_rounds")),
        ("seconds", ctypes.c_double),
        *((name, _POINTER) for name in ("interrupt", "hidden", "logits", "tokens")),
    )


# name: (result, arguments)
Functions = Mapping[str, tuple[type | None, tuple[type, ...]]]
_FUNCTIONS: Functions = {
    "nsm_kernels": (ctypes.c_char_p, (_INT,)),
    "nsm_model_new": (_POINTER, (_POINTER, _POINTER, _POINTER, ctypes.c_char_p)),
    "nsm_model_set_matrix": (_INT, (_POINTER, _INT, _INT, _POINTER, _POINTER, _INT, _INT)),
    "nsm_model_set_matrix4": (_INT, (_POINTER, _INT, _INT, _POINTER, _POINTER, _POINTER, _POINTER, _INT, _INT)),
    "nsm_model_set_router": (_INT, (_POINTER, _INT, _POINTER, _INT, _INT)),
    "nsm_model_set_floats": (_INT, (_POINTER, _INT, _INT, _POINTER, _INT)),
    "nsm_model_set_rotary": (_INT, (_POINTER, _POINTER, _INT)),
    "nsm_model_seal": (_INT, (_POINTER,)),
    "nsm_model_get_rows": (_INT, (_POINTER, _INT, _INT, _POINTER, _INT, _POINTER)),
    "nsm_model_free": (None, (_POINTER,)),
    "nsm_runner_new": (_POINTER, (_POINTER, _POINTER, _POINTER, _POINTER, _POINTER, _POINTER, _INT, _INT, _INT)),
    "nsm_prefer_huge_pages": (None, (_POINTER, ctypes.c_int64)),
    "nsm_run": (_INT, (_POINTER, _INT, _POINTER, _POINTER, _INT, _POINTER, _INT, _POINTER)),
    "nsm_logits": (_INT, (_POINTER, _POINTER, _INT, _POINTER)),
    "nsm_decode": (_INT, (_POINTER, ctypes.POINTER(Slice))),
    "nsm_mask": (None, (_POINTER, _INT, _POINTER, _INT, _POINTER, _INT)),
    "nsm_draw": (_INT, (ctypes.c_char_p, _POINTER, _INT, _POINTER, _INT, _POINTER, _POINTER, _POINTER)),
    "nsm_runner_free": (None, (_POINTER,)),
}


@functools.cache
def load_library() -> ctypes.CDLL | None:
    """The library of these sources; None if it was not built or does not load here."""
    path = library_path()
    if not path.exists():
        return None
    try:
        library = ctypes.CDLL(str(path))  # calls release the interpreter's lock
    except OSError as error:
        logger.warning("the native kernels do not load: %s", error)
        return None
    declare(library, _FUNCTIONS)
    return library


def missing_reason() -> str:
    """Why `load_library` gives None, with the command that helps."""
    fault = "are of other sources than this version's" if has_outdated() else "were not built"
    return f"the native kernels {fault}: {sys.executable} -m {BUILD} builds them, with a C++ compiler"


def require_library() -> ctypes.CDLL:
    """As `load_library`. Raises ValueError where it gives None."""
    library = load_library()
    if library is None:
        raise ValueError("the native kernels were not built")
    return library


def declare(library: ctypes.CDLL, functions: Functions) -> None:
    """Tells ctypes the types of functions of the library."""
    for name, (result, arguments) in functions.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments


def variants() -> tuple[str, ...]:
    """The variants of the kernels that this processor supports, fastest first; none without the library."""
    library = load_library()
    if library is None:
        return ()
    names = (library.nsm_kernels(index) for index in range(_NUM_VARIANTS))
    return tuple(name.decode() for name in names if name is not None)
