"""Reads PyTorch's files of tensors (`.pth`, `.pt`, `.bin`): a zip archive of a pickle and the numbers it refers to."""

from __future__ import annotations

from nsm_core.errors import CheckpointError
from nsm_core.formats.number_kinds import PLAIN
from nsm_core.formats.random_access import RandomAccessFile
from nsm_core.formats.stored_tensor import StoredTensor, shown_name
from nsm_core.formats.tensor_pickle import (
    DTYPES,
    MAX_PICKLE_BYTES,
    PickledTensor,
    UnreadablePickle,
    named_tensors,
    read_pickle,
)
from nsm_core.formats.zip_entries import ZipEntry, read_entries

_PICKLE = "data.pkl"


def read_pytorch(file: RandomAccessFile) -> dict[str, StoredTensor]:
    """The tensors by name. No code of the file runs. Raises CheckpointError that names file and tensor."""
    entries = read_entries(file)
    roots = [name.removesuffix(_PICKLE) for name in entries if name.endswith(f"/{_PICKLE}") or name == _PICKLE]
    if len(roots) != 1:
        raise CheckpointError(f"{file.path}: the zip archive has no {_PICKLE}: PyTorch has not written it")
    root = roots[0]
    _require_little_endian(file, entries.get(f"{root}byteorder"))
    pickle = entries[f"{root}{_PICKLE}"]
    if pickle.size > MAX_PICKLE_BYTES:
        raise CheckpointError(f"{file.path}: {_PICKLE} has {pickle.size} bytes, more than {MAX_PICKLE_BYTES}")
    try:
        found = named_tensors(read_pickle(file.read(pickle.offset, pickle.size)))
    except UnreadablePickle as error:
        raise CheckpointError(f"{file.path}: {error}") from error
    return {name: _stored(file, entries, f"{root}data/", name, tensor) for name, tensor in found.items()}


def _require_little_endian(file: RandomAccessFile, order: ZipEntry | None) -> None:
    if order is not None and file.read(order.offset, min(order.size, 16)) != b"little":
        raise CheckpointError(f"{file.path} has big-endian numbers, which are not read")


def _stored(
    file: RandomAccessFile, entries: dict[str, ZipEntry], folder: str, name: str, tensor: PickledTensor
) -> StoredTensor:
    storage = tensor.storage
    where = f"{file.path}: the tensor {shown_name(name)}"
    if storage.kind not in DTYPES:
        raise CheckpointError(f"{where} is stored as {storage.kind.split()[-1]!r}; read are {', '.join(PLAIN)}")
    entry = entries.get(folder + storage.key)
    if entry is None:
        raise CheckpointError(f"{where} is missing: the zip archive has no {storage.key[:80]!r}")
    kind = PLAIN[DTYPES[storage.kind]]
    if not (isinstance(tensor.shape, tuple) and isinstance(tensor.strides, tuple) and type(tensor.offset) is int):
        raise CheckpointError(f"{where} has no shape, strides and offset")
    stored = StoredTensor(
        file=file,
        name=name,
        kind=kind,
        shape=tensor.shape,
        offset=entry.offset + tensor.offset * kind.num_bytes,
        strides=None if tensor.strides == _dense(tensor.shape) else tensor.strides,
    )
    if tensor.offset < 0 or stored.offset + stored.num_bytes > entry.offset + entry.size:
        raise stored.error(f"takes {stored.num_bytes} bytes, and its part of the archive has {entry.size}")
    return stored


def _dense(shape: tuple[object, ...]) -> tuple[int, ...]:
    """The strides of rows without gaps; of a shape that is none, nothing."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= size if type(size) is int else 0
    return tuple(reversed(strides))
