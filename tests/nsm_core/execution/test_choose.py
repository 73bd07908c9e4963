"""Which executor a model gets, and what the log says about it."""

from __future__ import annotations

import dataclasses
import importlib.util
import logging
import sys
from pathlib import Path

import pytest
import torch

from nsm_core.errors import ConfigError
from nsm_core.execution.base import Executor
from nsm_core.execution.choose import choose_executor, decide_executor
from nsm_core.execution.eager import EagerExecutor
from nsm_core.execution.names import ExecutorName, executor_of_numerics
from nsm_core.execution.native import build, library
from nsm_core.execution.native.executor import NativeExecutor, numerics
from nsm_core.execution.native.precision import EXECUTORS, HALF_STATES, Precision
from nsm_core.execution.native.weights import native_unsupported_reason
from nsm_core.execution.rwkv7.executor import numerics as rwkv7_numerics
from nsm_core.loaded_model import numerics_class
from nsm_core.model.loader import LoadedNsm, load_checkpoint
from nsm_core.model.nsm import NsmModel
from nsm_core.model.storage import WeightFormat, save_model
from nsm_core.model.tiers import write_tier
from nsm_core.tokenizer import Tokenizer
from tests.support.models import RandomModel, as_loaded, random_model, small_config

needs_native = pytest.mark.skipif(not library.variants(), reason="there is no C++ compiler")


INT8_ERROR = 0.05  # of a hidden vector, from inputs that are rounded


def relative_error(executor: Executor, model: NsmModel) -> float:
    """How far a hidden vector is from that of the model, after a prompt and a step."""
    hidden = []
    for each in (executor, EagerExecutor(model, num_rows=1)):
        each.pool.lease(0)
        each.pool.write(0, each.initial)
        each.read((0,), (list(range(1, 40)),))
        hidden.append(each.step((0,), (5,)))
    return float((hidden[0] - hidden[1]).norm() / hidden[1].norm())


@pytest.fixture
def int8(tiny_tokenizer: Tokenizer) -> LoadedNsm:
    loaded = as_loaded(random_model(small_config(tiny_tokenizer.vocab_size)), tiny_tokenizer)
    return dataclasses.replace(loaded, weight_format="int8")


@needs_native
@pytest.mark.parametrize("name", ["auto", "native"])
def test_int8_files_run_on_the_native_one(
    int8: LoadedNsm, name: ExecutorName, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        chosen = choose_executor(int8, name)
    assert (chosen.name, chosen.numerics) == ("native", numerics(Precision.INT8))
    executor = chosen.factory(int8.model, num_rows=2, poison=False)
    assert isinstance(executor, NativeExecutor)
    assert f"native executor, kernels {library.variants()[0]}, {torch.get_num_threads()} threads" in caplog.text


@needs_native
def test_fp16_states_by_name_are_a_numerics_class_of_their_own(int8: LoadedNsm) -> None:
    chosen = choose_executor(int8, "native-fp16-states")
    assert (chosen.name, chosen.numerics) == ("native-fp16-states", numerics(Precision.INT8, half_states=True))
    executor = chosen.factory(int8.model, num_rows=2, poison=False)
    assert executor.pool.num_bytes < executor.pool.spec.num_bytes * 2
    assert choose_executor(int8, "native-int4-fp16-states").numerics == "cpu/int4/native-1/fp16-states"


def test_eager_by_name_is_eager(int8: LoadedNsm) -> None:
    chosen = choose_executor(int8, "eager")
    assert (chosen.name, chosen.numerics) == ("eager", int8.numerics)
    assert isinstance(chosen.factory(int8.model, num_rows=2, poison=False), EagerExecutor)


def test_auto_runs_fp32_files_eagerly(int8: LoadedNsm, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        chosen = choose_executor(dataclasses.replace(int8, weight_format="fp32"))
    assert chosen.name == "eager"
    assert "its file holds fp32 weights, which the native one would round to int8" in caplog.text


@needs_native
def test_fp32_files_are_rounded_where_that_was_asked_for(int8: LoadedNsm, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert choose_executor(dataclasses.replace(int8, weight_format="fp32"), "native").name == "native"
    assert "fp32 weights rounded to int8" in caplog.text


@needs_native
def test_int4_comes_by_name_alone_and_is_a_class_of_its_own(int8: LoadedNsm, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        chosen = choose_executor(int8, "native-int4")
    assert (chosen.name, chosen.numerics) == ("native-int4", "cpu/int4/native-1")
    assert decide_executor(int8, "native-int4") == (chosen.name, chosen.numerics)
    assert "int8 weights rounded to int4" in caplog.text
    assert choose_executor(int8).numerics == "cpu/int8/native-1"


def test_X18_a_machine_without_kernels_still_runs_and_names_the_command_that_builds_them(
    int8: LoadedNsm, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("nsm_core.execution.native.weights.load_library", lambda: None)
    assert choose_executor(int8).name == "eager"
    (record,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "several times slower" in record.message
    assert "the native kernels were not built" in record.message
    module = record.message.partition(f"{sys.executable} -m ")[2].split()[0]
    assert importlib.util.find_spec(module) is not None  # in a wheel too, where there is no make
    with pytest.raises(ConfigError, match="cannot run on the native executor: the native kernels were not built"):
        choose_executor(int8, "native")


def test_X18_kernels_of_older_sources_are_told_apart_from_none(
    int8: LoadedNsm, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """After an update of the code that nothing has built."""
    monkeypatch.setattr(build, "LIBRARIES", tmp_path)
    monkeypatch.setattr("nsm_core.execution.native.weights.load_library", library.load_library.__wrapped__)
    (tmp_path / "libnsm-0123456789abcdef.so").touch()
    assert choose_executor(int8).name == "eager"
    (record,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    fault = f"the native kernels are of other sources than this version's: {sys.executable} -m {build.__name__} builds"
    assert fault in record.message
    build.library_path().touch()
    assert not build.has_outdated()


@pytest.mark.parametrize("projector", ["direct", "hybrid"])
def test_auto_with_an_unsupported_projector_runs_eagerly_and_logs_the_reason(
    tiny_tokenizer: Tokenizer, projector: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = random_model(small_config(tiny_tokenizer.vocab_size, projector=projector))
    loaded = dataclasses.replace(as_loaded(model, tiny_tokenizer), weight_format="int8")
    assert choose_executor(loaded).name == "eager"
    with pytest.raises(ConfigError, match="native"):
        choose_executor(loaded, "native")
    if library.variants():
        assert f"read slots by attention alone, its projector is {projector}" in native_unsupported_reason(model)


@needs_native
def test_auto_on_a_portable_processor_runs_eagerly_unless_native_is_named(
    int8: LoadedNsm, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("nsm_core.execution.choose.variants", lambda: ("portable",))
    with caplog.at_level(logging.INFO):
        assert choose_executor(int8).name == "eager"
    assert "plain C++" in caplog.text
    assert choose_executor(int8, "native").name == "native"


@needs_native
def test_a_model_without_kernels_runs_eagerly(tiny_tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture) -> None:
    loaded = dataclasses.replace(
        as_loaded(RandomModel(tiny_tokenizer.vocab_size), tiny_tokenizer), weight_format="int8"
    )
    assert choose_executor(loaded).name == "eager"
    assert "not RandomModel" in caplog.text
    with pytest.raises(ConfigError, match="not RandomModel"):
        choose_executor(loaded, "native")


@needs_native
@pytest.mark.parametrize(("weight_format", "name"), [(WeightFormat.INT8, "native"), (WeightFormat.INT4, "native-int4")])
def test_a_tier_of_a_rounded_model_runs_on_its_native_executor(
    tiny_tokenizer: Tokenizer, tmp_path: Path, weight_format: WeightFormat, name: str
) -> None:
    config = small_config(tiny_tokenizer.vocab_size, router="sigmoid", write_top_k=8)
    save_model(random_model(config), tiny_tokenizer, tmp_path / "whole", weight_format)
    write_tier(tmp_path / "whole", 4, tmp_path / "small")
    loaded = load_checkpoint(tmp_path / "small")
    chosen = choose_executor(loaded)
    assert chosen.name == name
    assert relative_error(chosen.factory(chosen.model, num_rows=1, poison=True), loaded.model) < INT8_ERROR


@needs_native
def test_auto_runs_int8_files_of_keyed_layers_on_the_native_one(tiny_tokenizer: Tokenizer, tmp_path: Path) -> None:
    config = small_config(tiny_tokenizer.vocab_size, layer_pattern="KW", num_memory_slots=24, slot_width=32)
    save_model(random_model(config), tiny_tokenizer, tmp_path, WeightFormat.INT8)
    loaded = load_checkpoint(tmp_path)
    chosen = choose_executor(loaded)
    assert (chosen.name, chosen.numerics) == ("native", numerics(Precision.INT8))
    assert relative_error(chosen.factory(chosen.model, num_rows=1, poison=True), loaded.model) < INT8_ERROR


@needs_native
def test_auto_with_keyed_slots_of_an_odd_width_runs_eagerly_and_names_it(
    tiny_tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    config = small_config(tiny_tokenizer.vocab_size, layer_pattern="K", slot_width=24)
    loaded = dataclasses.replace(as_loaded(random_model(config), tiny_tokenizer), weight_format="int8")
    assert choose_executor(loaded).name == "eager"
    assert "need a multiple of 16: slot_width is 24" in caplog.text


@needs_native
def test_auto_with_allocating_layers_runs_eagerly_and_logs_the_reason(
    tiny_tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    config = small_config(tiny_tokenizer.vocab_size, allocation=True)
    loaded = dataclasses.replace(as_loaded(random_model(config), tiny_tokenizer), weight_format="int8")
    assert choose_executor(loaded).name == "eager"
    assert "no layers of the kind AllocatingMixer" in caplog.text
    with pytest.raises(ConfigError, match="AllocatingMixer"):
        choose_executor(loaded, "native")


def test_numerics_class_names_the_executor_that_computes_in_it() -> None:
    classes: dict[str, ExecutorName] = {numerics(precision): name for precision, name in EXECUTORS.items()}
    classes |= {rwkv7_numerics(precision): name for precision, name in EXECUTORS.items()}
    classes |= {numerics(precision, half_states=True): name for name, precision in HALF_STATES.items()}
    classes |= {
        numerics_class(torch.device("cpu")): "eager",
        "cuda/fp32/torch-2.13.0/NVIDIA H200": "eager",
        "cuda/bf16/kernels-2/torch-2.13.0/NVIDIA H200": "cuda",
        "cuda/fp32/rwkv7-kernels-1/torch-2.13.0/NVIDIA H200": "cuda-fp32",
    }
    assert {name: executor_of_numerics(name) for name in classes} == classes
    assert [executor_of_numerics(name) for name in ("", "cpu", "tpu/int8/native-1", "cpu/int2/native-1")] == [None] * 4
