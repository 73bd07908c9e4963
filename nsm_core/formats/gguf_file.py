"""Reads GGUF files, versions 2 and 3: keys with values, then tensors that may be quantised."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np

from nsm_core.errors import CheckpointError
from nsm_core.formats.number_kinds import PLAIN, QUANTISED, NumberKind
from nsm_core.formats.random_access import RandomAccessFile
from nsm_core.formats.stored_tensor import StoredTensor, shown_name

MAGIC = b"GGUF"
MAX_HEADER_BYTES = 64 << 20  # keys, the vocabulary among them, and descriptions of tensors
MAX_TEXTS = 1 << 20  # in one list
MAX_ITEMS = 1 << 16  # keys, and tensors
CHUNK_BYTES = 1 << 20
_TEXT, _LIST = 8, 9
_SCALARS = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d",
}  # fmt: skip

KINDS: Mapping[int, NumberKind] = {
    0: PLAIN["F32"],
    1: PLAIN["F16"],
    8: QUANTISED["Q8_0"],
    12: QUANTISED["Q4_K"],
    14: QUANTISED["Q6_K"],
    30: PLAIN["BF16"],
}
_OTHER_KINDS = {
    2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 13: "Q5_K", 15: "Q8_K",
    16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS",
    24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0",
}  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class Gguf:
    """`keys`: numbers, texts (bytes), lists of texts, or arrays of numbers. `tensors`: rows last, as in PyTorch."""

    keys: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]

    def text(self, key: str) -> str | None:
        """A text among the keys; None if there is none."""
        value = self.keys.get(key)
        return value.decode("utf-8", "replace") if isinstance(value, bytes) else None

    def whole(self, key: str) -> int | None:
        """A whole number among the keys; None if there is none."""
        value = self.keys.get(key)
        return value if type(value) is int else None


def is_gguf(file: RandomAccessFile) -> bool:
    return file.size >= len(MAGIC) and file.read(0, len(MAGIC)) == MAGIC


def read_gguf(file: RandomAccessFile) -> Gguf:
    """Keys and tensors. Raises CheckpointError that names file and tensor."""
    cursor = _Cursor(file)
    cursor.take(len(MAGIC))
    version = cursor.number("<I")
    if version not in (2, 3):
        raise CheckpointError(f"{file.path} is GGUF version {version}; read are 2 and 3, little-endian")
    num_tensors, num_keys = cursor.number("<Q"), cursor.number("<Q")
    if max(num_tensors, num_keys) > MAX_ITEMS:
        raise CheckpointError(f"{file.path} has {num_tensors} tensors and {num_keys} keys, more than {MAX_ITEMS}")
    keys = {}
    for _ in range(num_keys):
        name = cursor.text().decode("utf-8", "replace")
        keys[name] = cursor.value(cursor.number("<I"))
    if keys.get("split.count", 1) != 1:
        raise CheckpointError(f"{file.path} is one of {keys['split.count']} parts: join them with gguf-split --merge")
    descriptions = [_describe(cursor) for _ in range(num_tensors)]
    alignment = keys.get("general.alignment", 32)
    if type(alignment) is not int or not 0 < alignment <= 1 << 20:
        raise CheckpointError(f"{file.path}: general.alignment is {str(alignment)[:20]}")
    start = -(-cursor.position // alignment) * alignment
    return Gguf(keys, {description.name: _stored(file, description, start) for description in descriptions})


@dataclasses.dataclass(frozen=True, slots=True)
class _Description:
    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int


def _describe(cursor: _Cursor) -> _Description:
    name = cursor.text().decode("utf-8", "replace")
    num_dimensions = cursor.number("<I")
    if num_dimensions > 4:
        raise CheckpointError(f"{cursor.path}: the tensor {shown_name(name)} has {num_dimensions} dimensions")
    sizes = [cursor.number("<Q") for _ in range(num_dimensions)]
    return _Description(name, tuple(reversed(sizes)), cursor.number("<I"), cursor.number("<Q"))


def _stored(file: RandomAccessFile, described: _Description, start: int) -> StoredTensor:
    kind = KINDS.get(described.kind)
    if kind is None:
        other = _OTHER_KINDS.get(described.kind, f"kind {described.kind}")
        names = ", ".join(known.name for known in KINDS.values())
        raise CheckpointError(
            f"{file.path}: the tensor {shown_name(described.name)} is stored as {other}; read are {names}"
        )
    return StoredTensor(
        file=file, name=described.name, kind=kind, shape=described.shape, offset=start + described.offset
    )


class _Cursor:
    """Reads on from the file's beginning, a chunk at a time, up to MAX_HEADER_BYTES."""

    def __init__(self, file: RandomAccessFile) -> None:
        self._file = file
        self._chunk = memoryview(b"")
        self._at = 0
        self._chunk_start = 0

    @property
    def path(self) -> object:
        return self._file.path

    @property
    def position(self) -> int:
        return self._chunk_start + self._at

    def take(self, size: int) -> memoryview:
        """The next `size` bytes."""
        if size > len(self._chunk) - self._at:
            self._refill(size)
        taken = self._chunk[self._at : self._at + size]
        self._at += size
        return taken

    def _refill(self, size: int) -> None:
        position = self.position
        if position + size > MAX_HEADER_BYTES:
            raise CheckpointError(f"{self._file.path}: the header has more than {MAX_HEADER_BYTES} bytes")
        self._file.require(position, size)
        length = min(max(size, CHUNK_BYTES), self._file.size - position)
        self._chunk, self._chunk_start, self._at = memoryview(self._file.read(position, length)), position, 0

    def number(self, form: str) -> Any:
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def text(self) -> bytes:
        return bytes(self.take(self.number("<Q")))

    def value(self, kind: int) -> Any:
        """A value of the kind: a number, a text, or a list of one kind."""
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind == _TEXT:
            return self.text()
        if kind != _LIST:
            raise CheckpointError(f"{self._file.path}: a key has a value of the unknown kind {kind}")
        items, count = self.number("<I"), self.number("<Q")
        if items in _SCALARS:
            form = _SCALARS[items]
            return np.frombuffer(bytes(self.take(count * struct.calcsize(form))), np.dtype(form))
        if items != _TEXT or count > MAX_TEXTS:
            raise CheckpointError(f"{self._file.path}: a key has a list of {count} values of kind {items}")
        return [self.text() for _ in range(count)]
