"""Damaged and hostile files: one line that names file and tensor, whatever the bytes are, and little memory."""

from __future__ import annotations

import functools
import io
import json
import os
import pickle  # noqa: TID251  # the tests write what the reader must refuse
import re
import struct
import tracemalloc
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nsm_core.errors import CheckpointError
from nsm_core.formats.gguf_file import read_gguf
from nsm_core.formats.pytorch_file import read_pytorch
from nsm_core.formats.random_access import RandomAccessFile
from nsm_core.formats.safetensors_file import read_safetensors
from nsm_core.formats.stored_tensor import StoredTensor
from tests.support.model_files import write_gguf, write_pth, write_safetensors

TENSORS = {"first": torch.randn(4, 32), "second": torch.randn(3).bfloat16()}
MAX_PEAK_BYTES = 8 << 20  # of Python's memory, for a file of a few thousand bytes

Reader = Callable[[RandomAccessFile], Mapping[str, StoredTensor]]
READERS: dict[str, Reader] = {
    "safetensors": lambda file: read_safetensors(file)[0],
    "pth": read_pytorch,
    "gguf": lambda file: read_gguf(file).tensors,
    "gguf-q4_k": lambda file: read_gguf(file).tensors,
    "gguf-q6_k": lambda file: read_gguf(file).tensors,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("damage")


@functools.cache
def sound(format_name: str, folder: Path) -> bytes:
    path = folder / f"sound.{format_name}"
    if format_name.startswith("gguf"):
        keys = {"rwkv7.block_count": 2, "tokenizer.ggml.tokens": ["a", "b"], "general.name": "n"}
        kind = format_name[5:].upper() or "Q8_0"
        first = TENSORS["first"] if kind == "Q8_0" else torch.randn(2, 256)  # K blocks have 256 numbers
        write_gguf(path, {"first": first, "second": TENSORS["second"].float()}, keys, kind=kind)
    else:
        (write_pth if format_name == "pth" else write_safetensors)(path, TENSORS)
    return path.read_bytes()


def read_all(reader: Reader, path: Path) -> None:
    """All tensors, if their numbers are in the file."""
    for stored in reader(RandomAccessFile(path)).values():
        assert stored.count * 4 <= 16 * path.stat().st_size + 64  # what reading it allocates
        stored.read()


def refusal(format_name: str, path: Path, raw: bytes) -> str:
    path.write_bytes(raw)
    with pytest.raises(CheckpointError) as refused:
        read_all(READERS[format_name], path)
    message = str(refused.value)
    assert str(path) in message
    assert "\n" not in message
    assert len(message) < 500
    return message


EDIT = st.tuples(st.integers(0, 1 << 16), st.integers(0, 255), st.sampled_from("sid"))


@pytest.mark.parametrize("format_name", READERS)
@given(edits=st.lists(EDIT, min_size=1, max_size=8), cut=st.none() | st.integers(0, 1 << 16))
def test_a_file_with_changed_bytes_is_read_or_refused(
    folder: Path, format_name: str, edits: list[tuple[int, int, str]], cut: int | None
) -> None:
    raw = bytearray(sound(format_name, folder))
    for at, byte, edit in edits:
        at %= len(raw)
        raw[at : at + (edit != "i")] = b"" if edit == "d" else bytes([byte])
    if cut is not None:
        del raw[cut % len(raw) :]
    _read_or_refuse(folder, format_name, bytes(raw))


@pytest.mark.parametrize("format_name", READERS)
@given(raw=st.binary(max_size=400))
def test_any_bytes_after_a_sound_beginning_are_read_or_refused(folder: Path, format_name: str, raw: bytes) -> None:
    starts = {"safetensors": len(raw).to_bytes(8, "little"), "pth": b"PK\x03\x04", "gguf": b"GGUF\x03\0\0\0"}
    start = starts[format_name.partition("-")[0]]
    _read_or_refuse(folder, format_name, start + raw)


@given(raw=st.binary(max_size=300))
def test_any_bytes_as_a_pickle_are_read_or_refused(folder: Path, raw: bytes) -> None:
    _read_or_refuse(folder, "pth", archive(raw))


def _read_or_refuse(folder: Path, format_name: str, raw: bytes) -> None:
    path = folder / f"fuzzed.{format_name}"
    path.write_bytes(raw)
    message = str(path)
    tracemalloc.start()
    try:
        read_all(READERS[format_name], path)
    except CheckpointError as error:
        message = str(error)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert str(path) in message
    assert "\n" not in message
    assert peak < MAX_PEAK_BYTES


@pytest.mark.parametrize("format_name", READERS)
def test_a_file_cut_anywhere_is_refused(folder: Path, format_name: str) -> None:
    raw = sound(format_name, folder)
    for end in range(0, len(raw), 41):
        refusal(format_name, folder / "cut", raw[:end])


def archive(data: bytes, **entries: bytes) -> bytes:
    """A zip archive as PyTorch writes them, around a pickle."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as target:
        for name, raw in {"data.pkl": data, "byteorder": b"little", **entries}.items():
            target.writestr(f"archive/{name}", raw)
    return buffer.getvalue()


class RunsACommand:
    def __reduce__(self) -> Any:
        return os.system, ("touch /tmp/never",)


class CallsAKnownName:
    def __reduce__(self) -> Any:
        return torch._utils._rebuild_tensor_v2, ("not a storage", 0, (1,), (1,))  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ({"w": RunsACommand()}, "names '(posix|nt).system': only tensors are read, no code runs"),
        ({"w": eval}, "names 'builtins.eval'"),
        ({"w": CallsAKnownName()}, "a value is of another kind"),
        ({"w": pickle.PickleBuffer}, "names 'pickle.PickleBuffer'"),
        ([1, 2], "holds no dictionary of tensors"),
        ({("a",): 1}, "a value is of another kind"),
        ({"w": {1, 2}}, "instruction EMPTY_SET"),
    ],
)
def test_a_pickle_with_code_is_refused(tmp_path: Path, value: Any, says: str) -> None:
    message = refusal("pth", tmp_path / "a.pth", archive(pickle.dumps(value, protocol=4)))
    assert re.search(says, message), message


def test_a_storage_that_is_expanded_is_refused(tmp_path: Path) -> None:
    path = write_pth(tmp_path / "a.pth", {"w": torch.zeros(1).expand(1 << 40)})
    with pytest.raises(CheckpointError, match=r"a.pth: the tensor w has numbers that overlap"):
        read_pytorch(RandomAccessFile(path))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"data/0": b"\0" * 8}, "the tensor first takes 512 bytes, and its part of the archive has 8"),
        ({"byteorder": b"big"}, "big-endian"),
    ],
)
def test_a_pytorch_file_whose_entries_do_not_fit_is_refused(
    tmp_path: Path, folder: Path, change: dict[str, bytes], says: str
) -> None:
    with zipfile.ZipFile(io.BytesIO(sound("pth", folder))) as source:
        entries = {name.partition("/")[2]: source.read(name) for name in source.namelist()} | change
    assert says in refusal("pth", tmp_path / "a.pth", archive(entries.pop("data.pkl"), **entries))


def test_a_pytorch_file_without_a_storage_is_refused(tmp_path: Path, folder: Path) -> None:
    with zipfile.ZipFile(io.BytesIO(sound("pth", folder))) as source:
        data = next(source.read(name) for name in source.namelist() if name.endswith("data.pkl"))
    assert "the tensor first is missing" in refusal("pth", tmp_path / "a.pth", archive(data))


def test_whole_numbers_as_weights_are_refused(tmp_path: Path) -> None:
    path = write_pth(tmp_path / "a.pth", {"w": torch.zeros(3, dtype=torch.int64)})
    with pytest.raises(CheckpointError, match="the tensor w is stored as 'LongStorage'"):
        read_pytorch(RandomAccessFile(path))


def test_a_compressed_archive_is_refused(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as target:
        target.writestr("archive/data.pkl", b"\0" * 10_000_000)
    assert "compressed" in refusal("pth", tmp_path / "a.pth", buffer.getvalue())


def header(fields: object, numbers: bytes = b"") -> bytes:
    raw = json.dumps(fields).encode() if not isinstance(fields, bytes) else fields
    return len(raw).to_bytes(8, "little") + raw + numbers


def entry(shape: object = (1,), offsets: object = (0, 4), dtype: object = "F32") -> dict[str, Any]:
    return {"w": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        ((1 << 39).to_bytes(8, "little") + b"{}", "the header has 549755813888 bytes"),
        (header(b'{"a": '), "no JSON object"),
        (header(b"[" * 100_000), "no JSON object"),
        (header([1]), "no JSON object"),
        (header({"w": 1}), "the tensor w has no dtype"),
        (header(entry(shape=(float("nan"),)), b"\0" * 4), "the tensor w has the shape"),
        (header(entry(shape=(-1,)), b"\0" * 4), "the tensor w has the shape"),
        (header(entry(shape=(True,)), b"\0" * 4), "the tensor w has the shape"),
        (header(entry(shape=(2,)), b"\0" * 4), "the tensor w takes 8 bytes"),
        (header(entry(shape=(1 << 40, 1 << 40), offsets=(0, 1 << 82))), "cut short"),
        (header(entry(offsets=(4, 0)), b"\0" * 8), "the tensor w takes 4 bytes, and its offsets are 4 and 0"),
        (header(entry(offsets=(-4, 0)), b"\0" * 8), "the tensor w takes 4 bytes, and its offsets are -4 and 0"),
        (header(entry(offsets=(8, 12)), b"\0" * 4), "the tensor w takes 4 bytes at"),
        (header(entry(offsets=(0.0, 4.0)), b"\0" * 4), "no dtype, shape and data_offsets"),
        (header(entry(dtype="I64")), "the tensor w is stored as 'I64'"),
        (header({"w\n" * 200: 1}), "w\\nw"),
    ],
)
def test_a_hostile_safetensors_header_is_refused(tmp_path: Path, raw: bytes, says: str) -> None:
    assert says in refusal("safetensors", tmp_path / "a.safetensors", raw)


def gguf(num_tensors: int = 0, num_keys: int = 0, rest: bytes = b"", version: int = 3) -> bytes:
    return struct.pack("<4sIQQ", b"GGUF", version, num_tensors, num_keys) + rest


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def described(kind: int = 0, sizes: tuple[int, ...] = (4,), offset: int = 0) -> bytes:
    sizes_raw = struct.pack(f"<{len(sizes)}Q", *sizes)
    return text(b"w") + struct.pack("<I", len(sizes)) + sizes_raw + struct.pack("<IQ", kind, offset)


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (gguf(version=1), "version 1"),
        (gguf(version=0x03000000), "little-endian"),
        (gguf(num_tensors=1 << 60), "1152921504606846976 tensors"),
        (gguf(num_keys=1, rest=struct.pack("<Q", 1 << 40) + b"abc"), "the header has more than"),
        (gguf(num_keys=1, rest=text(b"k") + struct.pack("<IIQ", 9, 8, 1 << 50)), "a list of 1125899906842624 values"),
        (gguf(num_keys=1, rest=text(b"k") + struct.pack("<IIQ", 9, 4, 1 << 62)), "the header has more than"),
        (gguf(num_keys=1, rest=text(b"k") + struct.pack("<IIQ", 9, 9, 1)), "values of kind 9"),
        (gguf(num_keys=1, rest=text(b"k") + struct.pack("<I", 77)), "unknown kind 77"),
        (gguf(num_keys=1, rest=text(b"split.count") + struct.pack("<IH", 2, 3)), "one of 3 parts"),
        (gguf(num_keys=1, rest=text(b"general.alignment") + struct.pack("<II", 4, 0)), "general.alignment is 0"),
        (gguf(num_tensors=1, rest=described(kind=13)), "the tensor w is stored as Q5_K; read are F32, F16, Q8_0"),
        (gguf(num_tensors=1, rest=described(kind=99)), "stored as kind 99"),
        (gguf(num_tensors=1, rest=described(sizes=(1, 1, 1, 1, 1))), "the tensor w has 5 dimensions"),
        (gguf(num_tensors=1, rest=described(kind=8, sizes=(33,)) + b"\0" * 99), "rows of 33 numbers"),
        (gguf(num_tensors=1, rest=described(sizes=(1 << 50,))), "the tensor w has the shape"),
        (gguf(num_tensors=1, rest=described(sizes=(1 << 40,))), "the tensor w takes 4398046511104 bytes"),
        (gguf(num_tensors=1, rest=described(offset=1 << 60)), "the tensor w takes 16 bytes at"),
    ],
)
def test_a_hostile_gguf_header_is_refused(tmp_path: Path, raw: bytes, says: str) -> None:
    assert says in refusal("gguf", tmp_path / "a.gguf", raw)
