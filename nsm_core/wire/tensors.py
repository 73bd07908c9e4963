"""Names, datatypes and shapes of what crosses to a Triton worker and back; values as arrays. See `docs/triton.md`.

Pure: neither Triton's client nor its backend is imported here, both sides speak through these arrays.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from nsm_core.errors import InvalidRequest

CONTRACT_VERSION = 1  # rises with every change that an older side would misread

TEXT_INPUT = "text_input"
INPUT_IDS = "input_ids"
OPTIONS = "options"
STATE = "state"  # both ways
MESSAGES = "messages"  # of a link, both ways
TEXT_OUTPUT = "text_output"
TOKEN_IDS = "token_ids"
FINISH_REASON = "finish_reason"
DETAILS = "details"

MAX_SHOWN_CHARS = 80  # of a bad value, in a message

Tensors = Mapping[str, NDArray[Any]]


@dataclasses.dataclass(frozen=True, slots=True)
class TensorType:
    """One tensor of the contract. A dim of -1 is any length; the datatype BYTES is TYPE_STRING in model configs."""

    name: str
    datatype: str
    dims: tuple[int, ...]


INPUTS = (
    TensorType(TEXT_INPUT, "BYTES", (1,)),
    TensorType(INPUT_IDS, "INT32", (-1,)),
    TensorType(OPTIONS, "BYTES", (1,)),
    TensorType(STATE, "UINT8", (-1,)),
    TensorType(MESSAGES, "UINT8", (-1,)),
)
OUTPUTS = (
    TensorType(TEXT_OUTPUT, "BYTES", (1,)),
    TensorType(TOKEN_IDS, "INT32", (-1,)),
    TensorType(FINISH_REASON, "BYTES", (1,)),
    TensorType(DETAILS, "BYTES", (1,)),
    TensorType(STATE, "UINT8", (-1,)),
    TensorType(MESSAGES, "UINT8", (-1,)),
)


def refuse(name: str, expected: str, given: object) -> NoReturn:
    """Raises InvalidRequest that names the field, the expected value and the given one."""
    raise InvalidRequest(f"{name} must be {expected}, got {shown(given)}", param=name)


def shown(value: object) -> str:
    """A bad value for a message, cut when long."""
    text = repr(value)
    return text if len(text) <= MAX_SHOWN_CHARS else text[:MAX_SHOWN_CHARS] + "…"


def text_array(text: str) -> NDArray[Any]:
    """BYTES [1]."""
    return np.array([text.encode("utf-8")], dtype=np.object_)


def json_array(value: Mapping[str, object]) -> NDArray[Any]:
    """BYTES [1]: an object as JSON without blanks."""
    return text_array(json.dumps(value, separators=(",", ":"), allow_nan=False))


def ids_array(ids: Sequence[int]) -> NDArray[Any]:
    """INT32 [n]."""
    return np.array(ids, dtype=np.int32)


def bytes_array(raw: bytes) -> NDArray[Any]:
    """UINT8 [n], a view on `raw`."""
    return np.frombuffer(raw, dtype=np.uint8)


def read_text(tensors: Tensors, name: str) -> str | None:
    """The text of a BYTES [1] tensor, None where it is absent. Raises InvalidRequest naming it."""
    array = tensors.get(name)
    if array is None:
        return None
    if array.size != 1:
        refuse(name, "one string", f"{array.size} strings")
    value = array.reshape(-1)[0]
    if not isinstance(value, bytes):
        refuse(name, "a string", value)
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError:
        refuse(name, "valid UTF-8", value)


def read_json(tensors: Tensors, name: str) -> dict[str, Any] | None:
    """The JSON object in a BYTES [1] tensor, None where it is absent. Raises InvalidRequest naming it."""
    text = read_text(tensors, name)
    if text is None:
        return None
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        refuse(name, "one JSON object", text)
    if not isinstance(value, dict):
        refuse(name, "one JSON object", text)
    return value


def read_ids(tensors: Tensors, name: str) -> tuple[int, ...] | None:
    """Token ids of an INT32 tensor, None where it is absent. Raises InvalidRequest naming it."""
    array = tensors.get(name)
    if array is None:
        return None
    if array.dtype.kind not in "iu" or array.ndim > 2:
        refuse(name, "a list of whole numbers", f"{array.dtype} {list(array.shape)}")
    return tuple(array.reshape(-1).tolist())


def read_bytes(tensors: Tensors, name: str) -> bytes | None:
    """A copy of a UINT8 tensor's bytes, None where it is absent. Raises InvalidRequest naming it."""
    array = tensors.get(name)
    if array is None:
        return None
    if array.dtype != np.uint8:
        refuse(name, "UINT8", str(array.dtype))
    return array.tobytes()


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
