"""The worker's settings: `parameters` of the model's `config.pbtxt`, checked when Triton loads the model."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from nsm_core.config import EngineConfig
from nsm_core.errors import ConfigError
from nsm_core.wire.tensors import INPUTS, OUTPUTS, TensorType

MIB = 2**20
CONFIG_TYPES = {"BYTES": "TYPE_STRING", "INT32": "TYPE_INT32", "UINT8": "TYPE_UINT8"}
# Parameters that are the backend's own, not the model's
BACKEND_PARAMETERS = {"FORCE_CPU_ONLY_INPUT_TENSORS", "EXECUTION_ENV_PATH"}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """`model`: a model directory, None for the bundled one. `device`: auto, cpu or cuda. `num_threads`: of torch, 0 for
    its own choice. `kept_states_mb`: MiB of states that wait for their next turn; 0 keeps none. `drain_s`: requests may
    go on so long when the model is unloaded.
    """

    model: Path | None = None
    device: str = "auto"
    num_threads: int = 0
    max_slots: int = 16
    token_budget: int = 256
    queue_limit: int = 256
    max_prompt_tokens: int = 131072
    kept_states_mb: int = 1024
    drain_s: float = 20.0

    @property
    def engine(self) -> EngineConfig:
        return EngineConfig(max_slots=self.max_slots, token_budget=self.token_budget, queue_limit=self.queue_limit)


def _path(text: str) -> Path | None:
    return Path(text) if text else None


def _device(text: str) -> str:
    if text not in ("auto", "cpu", "cuda"):
        raise ValueError("must be auto, cpu or cuda")
    return text


def _at_least(low: int, kind: Callable[[str], Any] = int) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not low <= value < float("inf"):
            raise ValueError(f"must be a {'whole ' if kind is int else ''}number of at least {low}")
        return value

    return parse


PARAMETERS: Mapping[str, Callable[[str], Any]] = {
    "model": _path,
    "device": _device,
    "num_threads": _at_least(0),
    "max_slots": _at_least(1),
    "token_budget": _at_least(1),
    "queue_limit": _at_least(0),
    "max_prompt_tokens": _at_least(1),
    "kept_states_mb": _at_least(0),
    "drain_s": _at_least(0, float),
}


def read_config(model_config: str) -> WorkerConfig:
    """`model_config`: what Triton hands to `initialize`, JSON. Raises ConfigError naming what does not fit."""
    config = json.loads(model_config)
    _check_policy(config)
    _check_tensors("input", config.get("input", []), INPUTS)
    _check_tensors("output", config.get("output", []), OUTPUTS)
    parsed = {}
    for name, value in config.get("parameters", {}).items():
        if name in BACKEND_PARAMETERS:
            continue
        parsed[name] = _parse(name, value.get("string_value", ""))
    worker = WorkerConfig(**parsed)
    _ = worker.engine  # the limits together; raises ConfigError
    return worker


def _parse(name: str, text: str) -> Any:
    if name not in PARAMETERS:
        raise ConfigError(f"config.pbtxt: unknown parameter {name}; known: {', '.join(PARAMETERS)}")
    try:
        return PARAMETERS[name](text)
    except ValueError as error:
        raise ConfigError(f"config.pbtxt: parameter {name} {error}, got {text!r}") from error


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
