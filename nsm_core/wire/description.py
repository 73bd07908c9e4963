"""A worker's answers about itself, as the JSON object in `details`: its model, its health, one state."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from nsm_core.model_info import ModelInfo
from nsm_core.state.layout import parse_layout
from nsm_core.state.report import LayerUse, SlotFigures, SlotUse, StateReport
from nsm_core.stats import EngineStats, StateCacheStats
from nsm_core.wire.errors import reading_answer
from nsm_core.wire.tensors import (
    CONTRACT_VERSION,
    DETAILS,
    TEXT_OUTPUT,
    Tensors,
    json_array,
    read_json,
    refuse,
    text_array,
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WorkerDescription:
    """The answer to DescribeCall: the model, and what the worker takes. Constant while a worker lives.

    `tokenizer`: the text of its `tokenizer.json`, a few hundred KB. `max_slots` requests run at once, `queue_limit` may
    wait; each has at most `max_prompt_tokens`. `instances`: the names of all that the
    server has; a call may name one of them in its parameter `instance`.
    """

    model: ModelInfo
    tokenizer: str
    max_slots: int
    queue_limit: int
    max_prompt_tokens: int
    instances: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatus:
    """The answer to StatusCall. `is_ready`: requests are taken and a step of the engine's loop was not long ago."""

    is_ready: bool
    engine: EngineStats
    states: StateCacheStats


def encode_description(description: WorkerDescription) -> dict[str, Any]:
    return _details({"contract": CONTRACT_VERSION, **dataclasses.asdict(description)})


def decode_description(tensors: Tensors) -> WorkerDescription:
    """Raises EngineDead for an answer that no worker of this contract sends."""
    with reading_answer():
        details = _read_details(tensors)
        contract = details.pop("contract", None)
        if contract != CONTRACT_VERSION:
            refuse("contract", str(CONTRACT_VERSION), contract)
        model = details["model"]
        info = ModelInfo(**{**model, "state_layout": parse_layout(model["state_layout"])})
        instances = tuple(details["instances"])
        return WorkerDescription(**{**details, "model": info, "instances": instances})


def encode_status(status: WorkerStatus) -> dict[str, Any]:
    return _details(dataclasses.asdict(status))


def decode_status(tensors: Tensors) -> WorkerStatus:
    """Raises EngineDead for an answer that no worker of this contract sends."""
    with reading_answer():
        details = _read_details(tensors)
        engine, states = EngineStats.from_dict(details["engine"]), StateCacheStats(**details["states"])
        return WorkerStatus(is_ready=details["is_ready"], engine=engine, states=states)


def encode_report(report: StateReport) -> dict[str, Any]:
    return _details(dataclasses.asdict(report))


def decode_report(tensors: Tensors) -> StateReport:
    """Raises EngineDead for an answer that no worker of this contract sends."""
    with reading_answer():
        details = _read_details(tensors)
        layers = tuple(_layer(layer) for layer in details["layers"])
        return StateReport(position=details["position"], num_bytes=details["num_bytes"], layers=layers)


def _layer(value: Mapping[str, Any]) -> LayerUse:
    use, heads = value["use"], value["heads"]
    return LayerUse(
        **{
            **value,
            "use": None if use is None else _use(use),
            "heads": None if heads is None else tuple(_use(head) for head in heads),
        }
    )


def _use(value: Mapping[str, Any]) -> SlotUse:
    slots = value["slots"]
    figures = None if slots is None else tuple(SlotFigures(**slot) for slot in slots)
    return SlotUse(**{**value, "mean": SlotFigures(**value["mean"]), "slots": figures})


def _details(value: Mapping[str, object]) -> dict[str, Any]:
    return {TEXT_OUTPUT: text_array(""), DETAILS: json_array(value)}


def _read_details(tensors: Tensors) -> dict[str, Any]:
    details = read_json(tensors, DETAILS)
    if details is None:
        refuse(DETAILS, "given", None)
    return details
