from __future__ import annotations

import logging

import pytest
import torch

from nsm_core.config import EngineConfig, EngineLimits
from nsm_core.errors import ConfigError, DeviceUnusable
from nsm_core.execution import devices
from nsm_core.execution.choose import choose_executor
from nsm_core.execution.devices import engine_config, on_device, resolve_device, slots_within
from nsm_core.execution.names import ExecutorName
from nsm_core.model.loader import LoadedModel
from nsm_core.tokenizer import Tokenizer
from tests.support.models import as_loaded, random_model, small_config

MIB = 2**20


@pytest.fixture
def loaded(tiny_tokenizer: Tokenizer) -> LoadedModel:
    return as_loaded(random_model(small_config(tiny_tokenizer.vocab_size)), tiny_tokenizer)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch finds one GPU, whose kernels have a compiler and can run any model."""
    monkeypatch.setattr(devices, "gpu_missing_reason", lambda index=0: None if index == 0 else "torch finds 1 GPUs")
    monkeypatch.setattr(devices, "has_compiler", lambda: True)
    monkeypatch.setattr(devices, "gpu_kernels_missing_reason", lambda loaded: None)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "a GPU")


def placed(requested: str, executor: ExecutorName, loaded: LoadedModel, *, broken: str = "") -> list[str]:
    """The devices that were tried; making the model on the one that is `broken` fails."""
    tried: list[str] = []

    def load(device: str) -> LoadedModel:
        tried.append(device)
        return loaded

    def make(_: LoadedModel) -> None:
        if tried[-1] == broken:
            raise DeviceUnusable("the kernels fail their check")

    on_device(requested, executor, load, make)
    return tried


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("requested", "executor", "tried"),
    [
        ("auto", "auto", ["cuda:0"]),
        ("auto", "eager", ["cuda:0"]),
        ("auto", "native", ["cpu"]),
        ("cpu", "auto", ["cpu"]),
        ("cuda", "auto", ["cuda:0"]),
    ],
)
def test_a_model_is_put_on_the_device_that_suits_request_and_executor(
    requested: str, executor: ExecutorName, tried: list[str], loaded: LoadedModel
) -> None:
    assert placed(requested, executor, loaded) == tried


@pytest.mark.usefixtures("gpu")
def test_auto_takes_the_cpu_after_a_gpu_whose_kernels_fail_and_says_why(
    loaded: LoadedModel, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "nsm.execution"):
        assert placed("auto", "auto", loaded, broken="cuda:0") == ["cuda:0", "cpu"]
    assert "the model runs on the CPU, for the GPU cannot be used: the kernels fail their check" in caplog.text


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(("requested", "executor"), [("cuda", "auto"), ("auto", "cuda")])
def test_a_gpu_that_was_asked_for_and_fails_is_an_error(
    requested: str, executor: ExecutorName, loaded: LoadedModel
) -> None:
    with pytest.raises(DeviceUnusable, match="fail their check"):
        placed(requested, executor, loaded, broken="cuda:0")


def test_auto_takes_the_cpu_for_a_model_without_kernels(
    gpu: None, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(devices, "gpu_kernels_missing_reason", lambda loaded: "it has layers without such kernels")
    assert placed("auto", "auto", loaded) == ["cuda:0", "cpu"]
    assert "layers without such kernels" in caplog.text


def test_auto_takes_the_cpu_where_torch_finds_no_gpu_and_says_so(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(devices, "gpu_missing_reason", lambda index=0: "torch finds no GPU")
    with caplog.at_level(logging.INFO, "nsm.execution"):
        assert placed("auto", "auto", loaded) == ["cpu"]
    assert "the model runs on the CPU: torch finds no GPU" in caplog.text
    with pytest.raises(DeviceUnusable, match="device 'cuda' cannot be used: torch finds no GPU"):
        placed("cuda", "auto", loaded)
    with pytest.raises(DeviceUnusable, match="the executor cuda-fp16 needs a GPU: torch finds no GPU"):
        placed("auto", "cuda-fp16", loaded)


@pytest.mark.usefixtures("gpu")
def test_a_gpu_by_a_number_that_is_not_there_is_an_error() -> None:
    with pytest.raises(DeviceUnusable, match="device 'cuda:7' cannot be used: torch finds 1 GPUs"):
        resolve_device("cuda:7")


@pytest.mark.parametrize("name", ["gpu", "cuda:", "cuda:x", "CUDA", "cuda:0,cuda:1", ""])
def test_a_device_by_another_name_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="device must be"):
        resolve_device(name)


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch is built for GPUs")
def test_a_torch_without_support_for_gpus_is_the_reason() -> None:
    with pytest.raises(DeviceUnusable, match="was built without support for GPUs"):
        resolve_device("cuda:0")


@pytest.mark.parametrize(
    ("limits", "config"),
    [
        (EngineLimits(), EngineConfig(max_slots=16, token_budget=256)),
        (EngineLimits(max_slots=512), EngineConfig(max_slots=512, token_budget=512)),
        (EngineLimits(token_budget=8), EngineConfig(max_slots=8, token_budget=8)),
        (
            EngineLimits(max_slots=3, token_budget=40, queue_limit=1),
            EngineConfig(max_slots=3, token_budget=40, queue_limit=1),
        ),
    ],
)
def test_a_limit_that_is_not_given_is_the_devices_and_fits_the_other(
    limits: EngineLimits, config: EngineConfig, loaded: LoadedModel
) -> None:
    assert engine_config(limits, loaded) == config


@pytest.mark.parametrize(
    ("limits", "lines"),
    [
        (EngineLimits(token_budget=1), ["max_slots is 1 instead of 16, for token_budget is no larger"]),
        (EngineLimits(token_budget=16), []),
        (EngineLimits(max_slots=1, token_budget=1), []),
    ],
)
def test_slots_that_a_small_token_budget_takes_are_logged(
    limits: EngineLimits, lines: list[str], loaded: LoadedModel, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="nsm.execution")
    engine_config(limits, loaded)
    assert [record.getMessage() for record in caplog.records] == lines


@pytest.mark.parametrize(
    ("num_bytes", "state_bytes", "slots"),
    [(70 * 1024 * MIB, 4 * MIB, 512), (4096 * MIB, 4 * MIB, 512), (1000 * MIB, 4 * MIB, 128), (MIB, 4 * MIB, 1)],
)
def test_as_many_slots_of_a_gpu_as_its_memory_holds(num_bytes: int, state_bytes: int, slots: int) -> None:
    assert slots_within(num_bytes, state_bytes) == slots


def test_the_cuda_executor_on_a_cpu_is_refused(loaded: LoadedModel) -> None:
    with pytest.raises(ConfigError, match="cannot run on the executor for GPUs: it is not on a GPU"):
        choose_executor(loaded, "cuda")
