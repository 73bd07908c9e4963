"""Chooses the device of a model, and the limits of an engine that suit it."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import TypeVar

import torch

from nsm_core.config import EngineConfig, EngineLimits
from nsm_core.errors import ConfigError, DeviceUnusable
from nsm_core.execution.choose import gpu_kernels_missing_reason
from nsm_core.execution.names import AUTO_DEVICE, ExecutorName, check_device_name
from nsm_core.loaded_model import LoadedModel, SequenceModel
from nsm_core.ops.dispatch import has_compiler

logger = logging.getLogger("nsm.execution")

Made = TypeVar("Made")

CPU_SLOTS, CPU_TOKEN_BUDGET = 16, 256
# A step of 512 rows keeps a large GPU busy, and so does a prompt of 16,384 tokens: docs/performance.md
GPU_SLOTS, GPU_TOKEN_BUDGET = 512, 16384
# A prompt of 1,000 tokens takes about as long as two steps of 128 rows: those who decode wait no longer
GPU_PROMPT_TOKENS_BESIDE = 1024
# The share of a GPU's free memory that states may take by default: weights, graphs and prompts need the rest
STATE_SHARE = 0.5


def resolve_device(requested: str) -> str:
    """A device that torch can use: for `auto` a GPU if there is one. Raises DeviceUnusable, or ConfigError for a bad
    name.
    """
    if requested == AUTO_DEVICE:
        return "cpu" if gpu_missing_reason() else "cuda:0"
    try:
        check_device_name(requested)
    except ValueError as error:
        raise ConfigError(f"device {error}, got {requested!r}") from error
    if requested == "cpu":
        return requested
    name = requested if ":" in requested else f"{requested}:0"
    reason = gpu_missing_reason(int(name.partition(":")[2]))
    if reason is not None:
        raise DeviceUnusable(f"device {requested!r} cannot be used: {reason}")
    return name


def gpu_missing_reason(index: int = 0) -> str | None:
    """Why torch cannot use the GPU of this number, in words; None if it can."""
    if torch.version.cuda is None and torch.version.hip is None:
        return f"this torch ({torch.__version__}) was built without support for GPUs"
    if not torch.cuda.is_available():
        return "torch finds no GPU"
    if index >= torch.cuda.device_count():
        return f"torch finds {torch.cuda.device_count()} GPUs, and counts them from cuda:0"
    return None


def on_device(
    requested: str,
    executor: ExecutorName,
    load: Callable[[str], LoadedModel[SequenceModel]],
    make: Callable[[LoadedModel[SequenceModel]], Made],
) -> Made:
    """What `make` makes of the model that `load` puts on a device.

    `auto` takes a GPU whose kernels can run the model and pass their check, else the CPU, with a line in the log that
    names the reason. `make` raises DeviceUnusable if the device will not do. Raises that too, and what the two raise.
    """
    if requested != AUTO_DEVICE:
        return make(_logged(load, resolve_device(requested)))
    reason = _reason_against_gpus(executor)
    if reason is None:
        try:
            return make(_with_kernels(_logged(load, "cuda:0"), executor))
        except DeviceUnusable as error:
            if executor.startswith("cuda"):
                raise
            logger.warning("the model runs on the CPU, for the GPU cannot be used: %s", error)
    elif executor.startswith("cuda"):
        raise DeviceUnusable(f"the executor {executor} needs a GPU: {reason}")
    else:
        logger.info("the model runs on the CPU: %s", reason)
    return make(_logged(load, "cpu"))


def engine_config(limits: EngineLimits, loaded: LoadedModel[SequenceModel]) -> EngineConfig:
    """The limits with the defaults for the device that the model is on. Raises ConfigError."""
    device = loaded.device
    if device.type == "cpu":
        slots, budget = CPU_SLOTS, CPU_TOKEN_BUDGET
    else:
        free_bytes, _ = torch.cuda.mem_get_info(device)
        slots = slots_within(int(free_bytes * STATE_SHARE), loaded.model.state_spec.num_bytes)
        budget = GPU_TOKEN_BUDGET
    config = limits.resolve(max_slots=slots, token_budget=budget)
    if device.type != "cpu":
        config = dataclasses.replace(config, prompt_tokens_beside=min(config.token_budget, GPU_PROMPT_TOKENS_BESIDE))
    if limits.max_slots is None and config.max_slots < slots:
        logger.info("max_slots is %d instead of %d, for token_budget is no larger", config.max_slots, slots)
    return config


def slots_within(num_bytes: int, state_bytes: int) -> int:
    """The largest power of two of states that fit into so many bytes, at most GPU_SLOTS and at least one."""
    fitting = min(GPU_SLOTS, num_bytes // max(1, state_bytes))
    return 1 << max(0, fitting.bit_length() - 1)


def _logged(load: Callable[[str], LoadedModel[SequenceModel]], device: str) -> LoadedModel[SequenceModel]:
    logger.info(
        "loading the model on %s", device if device == "cpu" else f"{device} ({torch.cuda.get_device_name(device)})"
    )
    return load(device)


def _reason_against_gpus(executor: ExecutorName) -> str | None:
    """Why `auto` does not even try a GPU."""
    if executor.startswith("native"):
        return "native executors are for CPUs"
    reason = gpu_missing_reason()
    if reason is None and executor != "eager" and not has_compiler():
        reason = "the compiler of the kernels for GPUs (triton) is not installed"
    return reason


def _with_kernels(loaded: LoadedModel[SequenceModel], executor: ExecutorName) -> LoadedModel[SequenceModel]:
    """Raises DeviceUnusable if the kernels cannot run the model and nobody asked for another executor."""
    reason = None if executor == "eager" else gpu_kernels_missing_reason(loaded)
    if reason is not None:
        raise DeviceUnusable(f"the kernels cannot run {loaded.name}: {reason}")
    return loaded
