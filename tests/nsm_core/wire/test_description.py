from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from nsm_core.errors import EngineDead
from nsm_core.model_info import ModelInfo
from nsm_core.state.layout import TensorLayout
from nsm_core.state.report import LayerUse, SlotFigures, SlotUse, StateReport
from nsm_core.stats import EngineStats, StateCacheStats
from nsm_core.wire.description import (
    WorkerDescription,
    WorkerStatus,
    decode_description,
    decode_report,
    decode_status,
    encode_description,
    encode_report,
    encode_status,
)
from tests.nsm_core.wire.wire_values import received

DESCRIPTION = WorkerDescription(
    model=ModelInfo(
        name="tiny",
        fingerprint="f",
        numerics="cpu/fp32",
        created=1_700_000_000,
        vocab_size=512,
        num_parameters=99,
        state_bytes=8,
        state_layout=(TensorLayout("position", (), "int64"),),
        chat_template="plain-v1",
    ),
    tokenizer='{"é": 1}',
    max_slots=16,
    queue_limit=256,
    max_prompt_tokens=1000,
)
FIGURES = SlotFigures(key_norm=1.5, value_norm=None, moved=0.25, cosine=1.0)
USE = SlotUse(num_slots=8, untouched_share=0.5, effective_slots=None, mean=FIGURES, slots=(FIGURES, FIGURES))
REPORT = StateReport(
    position=7,
    num_bytes=8,
    layers=(
        LayerUse(layer=0, kind="slots", num_bytes=4, use=dataclasses.replace(USE, slots=None), heads=(USE, USE)),
        LayerUse(layer=1, kind="attention", num_bytes=4, window=256, filled=7),
    ),
)


def test_a_description_arrives_as_it_was() -> None:
    assert decode_description(received(encode_description(DESCRIPTION))) == DESCRIPTION


def test_a_status_arrives_as_it_was() -> None:
    status = WorkerStatus(
        is_ready=False, engine=EngineStats(num_running=3, step_seconds=0.125), states=StateCacheStats(num_hits=9)
    )
    assert decode_status(received(encode_status(status))) == status


def test_a_report_of_a_state_arrives_as_it_was() -> None:
    assert decode_report(received(encode_report(REPORT))) == REPORT


def text(value: str) -> np.ndarray[Any, Any]:
    return np.array([value.encode()], dtype=np.object_)


@pytest.mark.parametrize(
    ("decode", "details"),
    [
        (decode_description, '{"contract":2}'),
        (decode_description, '{"contract":1,"name":"x"}'),
        (decode_description, '{"contract":1,"model":{"name":"x"}}'),
        (decode_status, '{"is_ready":true}'),
        (decode_status, '{"is_ready":true,"engine":{"speed":9},"states":{}}'),
        (decode_report, '{"layers":[{"layer":0}]}'),
    ],
)
def test_an_answer_outside_the_contract_is_the_workers_fault(decode: Any, details: str) -> None:
    for tensors in ({"details": text(details)}, {}):
        with pytest.raises(EngineDead, match="not of contract 1"):
            decode(tensors)
