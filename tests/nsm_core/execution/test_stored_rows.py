"""Kernels and the eager model take matrices as a file has them: the bits are those of weights read in fp32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from nsm_core.architectures import open_model
from nsm_core.execution.choose import choose_executor
from nsm_core.execution.names import ExecutorName
from nsm_core.execution.native.library import variants
from nsm_core.loaded_model import LoadedModel, SequenceModel
from nsm_core.model.loader import LoadedNsm, load_checkpoint, open_checkpoint
from nsm_core.model.storage import WeightFormat, convert_model, save_model
from nsm_core.rwkv7.loader import load_rwkv7
from nsm_core.rwkv7.opening import OpenModel
from nsm_core.rwkv7.saving import save_model as save_rwkv7
from nsm_core.tokenizer import Tokenizer
from tests.support.models import random_model, small_config
from tests.support.rwkv7_files import WRITERS, model_tensors

needs_native = pytest.mark.skipif(not variants(), reason="there is no C++ compiler")
PATTERNS = ("NW", "KW")
IDS = list(range(3, 40))


def logits(loaded: LoadedModel[SequenceModel], name: ExecutorName) -> Tensor:
    """After a prompt and a token."""
    chosen = choose_executor(loaded, name)
    executor = chosen.factory(chosen.model, num_rows=1, poison=False)
    executor.pool.lease(0)
    executor.pool.write(0, executor.initial)
    executor.read((0,), (IDS,))
    return executor.logits(executor.step((0,), (7,))).clone()


@pytest.fixture(params=PATTERNS)
def int8(request: pytest.FixtureRequest, tiny_tokenizer: Tokenizer, tmp_path: Path) -> Path:
    config = small_config(
        tiny_tokenizer.vocab_size, layer_pattern=request.param, num_memory_slots=24, slot_width=32, write_top_k=24
    )
    save_model(random_model(config), tiny_tokenizer, tmp_path / "int8", WeightFormat.INT8)
    return tmp_path / "int8"


@pytest.fixture
def int4(int8: Path) -> Path:
    convert_model(int8, int8.with_name("int4"), WeightFormat.INT4, chat_template=None)
    return int8.with_name("int4")


@needs_native
@pytest.mark.parametrize("name", ["native", "native-int4", "native-int4-fp16-states"])
def test_an_opened_model_has_the_bits_of_a_read_one(int8: Path, int4: Path, name: ExecutorName) -> None:
    for directory in (int8, int4):
        if directory == int8 or name == "native":  # else stored grids are not rounded again: see below
            assert logits(open_checkpoint(directory), name).equal(logits(load_checkpoint(directory), name))


@needs_native
@pytest.mark.parametrize("name", ["auto", "native-int4", "native-int4-fp16-states"])
def test_an_int4_file_has_the_bits_of_rounding_at_the_start(int8: Path, int4: Path, name: ExecutorName) -> None:
    at_start = "native-int4" if name == "auto" else name
    assert logits(open_model(int4), name).equal(logits(load_checkpoint(int8), at_start))


def test_the_eager_model_is_filled(int8: Path, int4: Path) -> None:
    for directory in (int8, int4):
        opened = open_checkpoint(directory)
        assert opened.model.embedding.weight.isnan().all()  # a use of it would not go unseen
        assert logits(opened, "eager").equal(logits(load_checkpoint(directory), "eager"))


def test_an_opened_model_has_no_large_matrix_in_memory(int8: Path) -> None:
    opened: LoadedNsm = open_checkpoint(int8)
    assert opened.num_parameters == load_checkpoint(int8).num_parameters
    for name in opened.matrices:
        assert opened.model.get_parameter(name).untyped_storage().nbytes() <= torch.float32.itemsize


@needs_native
def test_an_int4_file_of_rwkv7_has_the_bits_of_rounding_at_the_start(tmp_path: Path) -> None:
    halves = {name: value.bfloat16() for name, value in model_tensors().items()}
    source = WRITERS["pth"](tmp_path, halves)
    save_rwkv7(OpenModel(source), tmp_path / "int4", "int4", chat_template="rwkv-v1")
    assert logits(load_rwkv7(tmp_path / "int4"), "auto").equal(logits(load_rwkv7(source), "native-int4"))
