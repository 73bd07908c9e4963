"""The worker's settings: `parameters` of the model's `config.pbtxt`, checked when Triton loads the model."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from nsm_core.config import EngineLimits, require_at_least, require_one_of
from nsm_core.energy.estimate import CORE_WATTS
from nsm_core.errors import ConfigError
from nsm_core.execution.names import AUTO_DEVICE, EXECUTOR_NAMES, ExecutorName, check_device_name
from nsm_core.wire.calls import MAX_TIMEOUT_S
from nsm_core.wire.tensors import INPUTS, OUTPUTS, TensorType

MIB = 2**20
MAX_DRAIN_S = 3_600.0  # Triton waits no longer than its own exit time-out, which nobody sets to more
CONFIG_TYPES = {"BYTES": "TYPE_STRING", "INT32": "TYPE_INT32", "UINT8": "TYPE_UINT8"}
# Parameters that are the backend's own, not the model's
BACKEND_PARAMETERS = {"FORCE_CPU_ONLY_INPUT_TENSORS", "EXECUTION_ENV_PATH"}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """`engine`: its max_slots and token_budget are 0 in the file for the device's default. `model`: a model directory,
    None for the bundled one. `device`: auto, cpu, cuda or cuda:N. `executor`: how the model is computed, see
    choose_executor. `num_threads`: of the model on a CPU, 0 for torch's own choice. `max_tokens_limit`: most new tokens
    of one call. `default_timeout_s`, `max_timeout_s`: of a call that names no `timeout_s`, and the longest that one may
    name. `kept_states_mb`: MiB of states that wait for their next turn; 0 keeps none. `drain_s`: requests may go on so
    long when the model is unloaded. `energy`: count joules; `energy_core_watts`: of a busy core, where nothing measures
    it.
    """

    engine: EngineLimits = dataclasses.field(default_factory=EngineLimits)
    model: Path | None = None
    device: str = AUTO_DEVICE
    executor: ExecutorName = "auto"
    num_threads: int = 0
    max_prompt_tokens: int = 131072
    max_tokens_limit: int = 131072
    default_timeout_s: float = 600.0
    max_timeout_s: float = MAX_TIMEOUT_S
    kept_states_mb: int = 1024
    drain_s: float = 20.0
    energy: bool = True
    energy_core_watts: float = CORE_WATTS

    def __post_init__(self) -> None:
        try:
            check_device_name(self.device)
        except ValueError as error:
            raise ConfigError(f"device {error}, got {self.device!r}") from error
        require_one_of("executor", self.executor, EXECUTOR_NAMES)
        for name, low in (
            ("num_threads", 0),
            ("max_prompt_tokens", 1),
            ("max_tokens_limit", 1),
            ("kept_states_mb", 0),
            ("drain_s", 0),
        ):
            require_at_least(name, getattr(self, name), low)
        if self.drain_s > MAX_DRAIN_S:
            raise ConfigError(f"drain_s must be at most {MAX_DRAIN_S:g} seconds, got {self.drain_s}")
        for name, high in (("max_timeout_s", MAX_TIMEOUT_S), ("default_timeout_s", self.max_timeout_s)):
            if not 0 < getattr(self, name) <= high:
                raise ConfigError(f"{name} must be in (0, {high:g}] seconds, got {getattr(self, name)}")
        if not self.energy_core_watts > 0:
            raise ConfigError(f"energy_core_watts must be above 0, got {self.energy_core_watts}")


def _path(text: str) -> Path | None:
    return Path(text) if text else None


def _flag(text: str) -> bool:
    if text not in ("true", "false"):
        raise ConfigError(f"must be true or false, got {text!r}")
    return text == "true"


def _number(kind: type[int] | type[float], expected: str) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        try:
            return kind(text)
        except ValueError:
            raise ConfigError(f"must be {expected}, got {text!r}") from None

    return parse


_whole = _number(int, "a whole number")


def _whole_or_default(text: str) -> int | None:
    return _whole(text) or None


_ENGINE_PARAMETERS = tuple(field.name for field in dataclasses.fields(EngineLimits))
PARAMETERS: Mapping[str, Callable[[str], Any]] = {
    **dict.fromkeys(_ENGINE_PARAMETERS, _whole),
    **dict.fromkeys(("max_slots", "token_budget"), _whole_or_default),
    "speculation": str,
    "model": _path,
    "device": str,
    "executor": str,
    "num_threads": _whole,
    "max_prompt_tokens": _whole,
    "max_tokens_limit": _whole,
    "default_timeout_s": _number(float, "a number"),
    "max_timeout_s": _number(float, "a number"),
    "kept_states_mb": _whole,
    "drain_s": _number(float, "a number"),
    "energy": _flag,
    "energy_core_watts": _number(float, "a number"),
}


def read_config(model_config: str) -> WorkerConfig:
    """`model_config`: what Triton hands to `initialize`, JSON. Raises ConfigError naming what does not fit."""
    config = json.loads(model_config)
    _check_policy(config)
    _check_tensors("input", config.get("input", []), INPUTS)
    _check_tensors("output", config.get("output", []), OUTPUTS)
    parsed = _parse(config.get("parameters", {}))
    engine = {name: parsed.pop(name) for name in _ENGINE_PARAMETERS if name in parsed}
    try:
        return WorkerConfig(engine=EngineLimits(**engine), **parsed)
    except ConfigError as error:
        raise ConfigError(f"config.pbtxt: parameter {error}") from error


def _parse(parameters: Mapping[str, Mapping[str, str]]) -> dict[str, Any]:
    parsed = {}
    for name, value in parameters.items():
        if name in BACKEND_PARAMETERS:
            continue
        if name not in PARAMETERS:
            raise ConfigError(f"config.pbtxt: unknown parameter {name}; known: {', '.join(PARAMETERS)}")
        try:
            parsed[name] = PARAMETERS[name](value.get("string_value", ""))
        except ConfigError as error:
            raise ConfigError(f"config.pbtxt: parameter {name} {error}") from error
    return parsed


def _check_policy(config: Mapping[str, Any]) -> None:
    if not config.get("model_transaction_policy", {}).get("decoupled", False):
        raise ConfigError("config.pbtxt: model_transaction_policy must be decoupled: true")
    if int(config.get("max_batch_size", 0)) != 0:
        raise ConfigError("config.pbtxt: max_batch_size must be 0: the engine batches by itself, step by step")


def _check_tensors(section: str, given: list[Mapping[str, Any]], wanted: tuple[TensorType, ...]) -> None:
    """The contract's tensors and no others; every input may be left out by a client."""
    found = {tensor["name"]: tensor for tensor in given}
    for tensor in wanted:
        want: dict[str, object] = {"data_type": CONFIG_TYPES[tensor.datatype], "dims": list(tensor.dims)}
        if section == "input":
            want["optional"] = True
        entry = found.pop(tensor.name, {})
        got = {name: entry.get(name) for name in want}
        if isinstance(got["dims"], list):
            got["dims"] = [int(dim) for dim in got["dims"]]  # Triton writes 64-bit numbers as strings
        if got != want:
            raise ConfigError(f"config.pbtxt: {section} {tensor.name} must be {want}, got {got}")
    if found:
        raise ConfigError(f"config.pbtxt: {section} {', '.join(sorted(found))} is not part of the contract")
