"""Reads and writes `.safetensors`: a length, a JSON header, then the numbers of each tensor."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nsm_core.errors import CheckpointError
from nsm_core.formats.number_kinds import PLAIN
from nsm_core.formats.random_access import RandomAccessFile
from nsm_core.formats.stored_tensor import StoredTensor, shown_name

# A model of 13B parameters has 0.3 MB of it, and what JSON becomes in memory is up to 30 times as large
MAX_HEADER_BYTES = 8 << 20
_LENGTH_BYTES = 8


def is_safetensors(file: RandomAccessFile) -> bool:
    """By its first bytes: a length that is in the file, and the beginning of a JSON object."""
    if file.size < _LENGTH_BYTES + 2:
        return False
    raw = file.read(0, _LENGTH_BYTES + 1)
    return raw[-1:] == b"{" and int.from_bytes(raw[:-1], "little") < 1 << 40


def read_safetensors(file: RandomAccessFile) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """The tensors by name, and the file's metadata. Raises CheckpointError that names file and tensor."""
    length = int.from_bytes(file.read(0, _LENGTH_BYTES), "little")
    if length > MAX_HEADER_BYTES:
        raise CheckpointError(f"{file.path}: the header has {length} bytes, more than {MAX_HEADER_BYTES}")
    try:
        header = json.loads(file.read(_LENGTH_BYTES, length))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file.path}: the header is no JSON object: {type(error).__name__}") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{file.path}: the header is no JSON object")
    metadata = header.pop("__metadata__", {})
    start = _LENGTH_BYTES + length
    tensors = {name: _entry(file, name, fields, start) for name, fields in header.items()}
    texts = metadata.items() if isinstance(metadata, dict) else ()
    return tensors, {key: value for key, value in texts if isinstance(value, str)}


def _entry(file: RandomAccessFile, name: str, fields: Any, start: int) -> StoredTensor:
    try:
        dtype, shape, (first, end) = fields["dtype"], tuple(fields["shape"]), fields["data_offsets"]
        is_sound = isinstance(dtype, str) and type(first) is int and type(end) is int
    except (KeyError, TypeError, ValueError):
        is_sound = False
    if not is_sound:
        raise CheckpointError(f"{file.path}: the tensor {shown_name(name)} has no dtype, shape and data_offsets")
    if dtype not in PLAIN:
        raise CheckpointError(
            f"{file.path}: the tensor {shown_name(name)} is stored as {dtype[:20]!r}; read are {', '.join(PLAIN)}"
        )
    stored = StoredTensor(file=file, name=name, kind=PLAIN[dtype], shape=shape, offset=start + first)
    if first < 0 or stored.num_bytes != end - first:
        raise stored.error(f"takes {stored.num_bytes} bytes, and its offsets are {first} and {end}")
    return stored


_DTYPES = {kind.dtype: name for name, kind in PLAIN.items()}

Planned = tuple[str, torch.dtype, tuple[int, ...]]


def write_safetensors(
    path: Path, planned: Iterable[Planned], read: Callable[[str], Tensor], *, metadata: Mapping[str, str]
) -> None:
    """Writes the planned tensors, names with dtypes and shapes, one after another: `read` makes them, one at a time.

    The file appears whole or not at all. Raises OSError.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    at = 0
    for name, dtype, shape in planned:
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        header[name] = {"dtype": _DTYPES[dtype], "shape": list(shape), "data_offsets": [at, at + num_bytes]}
        at += num_bytes
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)  # numbers begin at a multiple of their size
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("wb") as file:
            file.write(len(raw).to_bytes(_LENGTH_BYTES, "little") + raw)
            for name in header:
                if name != "__metadata__":
                    file.write(read(name).contiguous().flatten().view(torch.uint8).numpy().data)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
