"""Every reader gives back what the format's own library wrote, and reads nothing but headers until it is asked."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from nsm_core.errors import CheckpointError
from nsm_core.formats import safetensors_file
from nsm_core.formats.gguf_file import read_gguf
from nsm_core.formats.pytorch_file import read_pytorch
from nsm_core.formats.random_access import RandomAccessFile
from nsm_core.formats.safetensors_file import read_safetensors
from tests.support.model_files import quantised, write_gguf, write_pth, write_safetensors

TENSORS = {
    "matrix": torch.randn(5, 7),
    "half": torch.randn(3, 4).half(),
    "brain": torch.randn(6).bfloat16(),
    "double": torch.randn(2, 2).double(),
    "row": torch.randn(1, 1, 9),
    "number": torch.tensor(2.5),
    "none": torch.zeros(0, 3),
}


def test_safetensors_are_read_as_they_were_written(tmp_path: Path) -> None:
    file = RandomAccessFile(write_safetensors(tmp_path / "a.safetensors", TENSORS))
    stored, metadata = read_safetensors(file)
    assert metadata == {}
    for name, value in TENSORS.items():
        torch.testing.assert_close(stored[name].read(), value, rtol=0, atol=0)


def test_safetensors_that_are_written_here_are_read_by_their_own_library(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    planned = [(name, value.dtype, tuple(value.shape)) for name, value in TENSORS.items()]
    safetensors_file.write_safetensors(path, planned, TENSORS.__getitem__, metadata={"format": "pt"})
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]
    for name, value in load_file(path).items():
        torch.testing.assert_close(value, TENSORS[name], rtol=0, atol=0)
    assert read_safetensors(RandomAccessFile(path))[1] == {"format": "pt"}


def test_pytorch_files_are_read_as_they_were_written(tmp_path: Path) -> None:
    whole = torch.randn(4, 6)
    tensors = TENSORS | {
        "turned": torch.randn(8, 4).t(),
        "part": whole[1:3, 2:5],
        "same": whole,
        "parameter": torch.nn.Parameter(torch.randn(2, 2)),
    }
    path = write_pth(tmp_path / "a.pth", tensors | {"step": 3, "about": "text", "more": [1.5, None, True]})
    stored = read_pytorch(RandomAccessFile(path))
    assert stored.keys() == tensors.keys()
    for name, value in tensors.items():
        torch.testing.assert_close(stored[name].read(), value.detach(), rtol=0, atol=0)


def test_a_state_dictionary_with_attributes_is_read(tmp_path: Path) -> None:
    module = torch.nn.Linear(3, 4)
    state = OrderedDict(module.state_dict())
    path = tmp_path / "a.pth"
    torch.save(module.state_dict(), path)  # noqa: TID251  # it carries versions of modules as an attribute
    assert torch.equal(read_pytorch(RandomAccessFile(path))["weight"].read(), state["weight"])


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_K", "Q6_K"])
def test_gguf_tensors_equal_what_its_library_makes_of_them(tmp_path: Path, kind: str) -> None:
    numbers = torch.randn(6, 512)
    path = write_gguf(tmp_path / "a.gguf", {"matrix": numbers, "vector": numbers[0]}, {}, kind=kind)
    stored = read_gguf(RandomAccessFile(path)).tensors
    want = gguf.quants.dequantize(
        quantised(numbers.numpy(), gguf.GGMLQuantizationType[kind]), gguf.GGMLQuantizationType[kind]
    )
    np.testing.assert_array_equal(stored["matrix"].read().float().numpy(), want)
    assert torch.equal(stored["vector"].read(), numbers[0])


def test_quantised_numbers_that_take_several_chunks_equal_those_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_gguf(tmp_path / "a.gguf", {"matrix": torch.randn(6, 512)}, {}, kind="Q8_0")
    stored = read_gguf(RandomAccessFile(path)).tensors["matrix"]
    whole = stored.read()
    monkeypatch.setattr("nsm_core.formats.stored_tensor.CHUNK_BYTES", 100)
    assert torch.equal(stored.read(), whole)


def test_gguf_keys_are_numbers_texts_and_lists(tmp_path: Path) -> None:
    keys = {"a.number": 3, "a.real": 0.5, "a.text": "é", "a.texts": ["x", "yz"]}
    read = read_gguf(RandomAccessFile(write_gguf(tmp_path / "a.gguf", {"t": torch.zeros(2)}, keys)))
    assert (read.whole("a.number"), read.text("a.text"), read.keys["a.real"]) == (3, "é", 0.5)
    assert read.keys["a.texts"] == [b"x", b"yz"]
    assert (read.whole("a.text"), read.text("a.number"), read.text("none")) == (None, None, None)


def test_a_file_that_becomes_shorter_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    path = write_safetensors(tmp_path / "a.safetensors", TENSORS)
    stored, _ = read_safetensors(RandomAccessFile(path))
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 600)
    with pytest.raises(CheckpointError, match=r"a.safetensors became shorter"):
        [tensor.read() for tensor in stored.values()]


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing", Path("/dev/null")):
        with pytest.raises(CheckpointError, match=str(path)):
            RandomAccessFile(path)
