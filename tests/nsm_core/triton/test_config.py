from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest

from nsm_core.errors import ConfigError
from nsm_core.triton.config import BACKEND_PARAMETERS, CONFIG_TYPES, PARAMETERS, WorkerConfig, read_config
from nsm_core.wire.tensors import INPUTS, OUTPUTS
from tests.nsm_core.triton.fake_triton import worker_config

CONFIG_FILE = Path(__file__).parents[3] / "model_repository" / "nsm" / "config.pbtxt"


def model_config(**parameters: str) -> dict[str, Any]:
    """As Triton hands it over: 64-bit numbers are strings there."""

    def tensors(names: Any, **fields: Any) -> list[dict[str, Any]]:
        return [
            {"name": t.name, "data_type": CONFIG_TYPES[t.datatype], "dims": [str(dim) for dim in t.dims], **fields}
            for t in names
        ]

    return {
        "name": "nsm",
        "max_batch_size": 0,
        "model_transaction_policy": {"decoupled": True},
        "input": tensors(INPUTS, optional=True),
        "output": tensors(OUTPUTS),
        "parameters": {name: {"string_value": value} for name, value in parameters.items()},
    }


def read(config: dict[str, Any]) -> WorkerConfig:
    return read_config(json.dumps(config))


def test_parameters_are_the_workers_settings() -> None:
    assert read(model_config()) == WorkerConfig()
    config = read(
        model_config(
            model="/m", device="cpu", max_slots="4", queue_limit="0", drain_s="1.5", FORCE_CPU_ONLY_INPUT_TENSORS="yes"
        )
    )
    assert config == worker_config(model=Path("/m"), device="cpu", max_slots=4, queue_limit=0, drain_s=1.5)


def test_the_file_names_every_parameter_with_its_default() -> None:
    found = dict(re.findall(r'key: "(\w+)" value { string_value: "([^"]*)" }', CONFIG_FILE.read_text("utf-8")))
    assert set(found) - BACKEND_PARAMETERS == set(PARAMETERS)
    assert read(model_config(**found)) == WorkerConfig()


def test_a_budget_below_the_slots_is_told_by_name() -> None:
    with pytest.raises(ConfigError, match=r"parameter token_budget \(256\) must be at least max_slots"):
        read(model_config(max_slots="512", token_budget="256"))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("max_slots", "-1", "parameter max_slots must be a number of at least 1, got -1"),
        ("max_slots", "many", "parameter max_slots must be a whole number, got 'many'"),
        ("max_slots", "1.5", "parameter max_slots must be a whole number, got '1.5'"),
        ("queue_limit", "-1", "parameter queue_limit must be a number of at least 0, got -1"),
        ("max_prompt_tokens", "0", "parameter max_prompt_tokens must be a number of at least 1, got 0"),
        ("max_tokens_limit", "0", "parameter max_tokens_limit must be a number of at least 1, got 0"),
        ("max_timeout_s", "1e9", r"parameter max_timeout_s must be in \(0, 86400\] seconds, got 1000000000.0"),
        ("max_timeout_s", "60", r"parameter default_timeout_s must be in \(0, 60\] seconds, got 600.0"),
        ("default_timeout_s", "nan", r"parameter default_timeout_s must be in \(0, 86400\] seconds, got nan"),
        ("drain_s", "inf", "parameter drain_s must be a number of at least 0, got inf"),
        ("drain_s", "1e9", "parameter drain_s must be at most 3600 seconds, got 1000000000.0"),
        ("device", "tpu", "parameter device must be auto, cpu, cuda, or a GPU by its number as cuda:1, got 'tpu'"),
        ("speculation", "ngram", "parameter speculation must be one of off, lookup, got 'ngram'"),
        ("max_slot", "3", "unknown parameter max_slot; known: max_slots, token_budget"),
    ],
)
def test_a_bad_parameter_is_told_by_name(name: str, value: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(model_config(**{name: value}))


def test_a_configuration_outside_the_contract_is_refused() -> None:
    changes = {
        "must be decoupled": lambda config: config.pop("model_transaction_policy"),
        "max_batch_size must be 0": lambda config: config.update(max_batch_size=8),
        "input messages must be": lambda config: config["input"].pop(),
        "input text_input must be": lambda config: config["input"][0].update(optional=False),
        "output token_ids must be": lambda config: config["output"][1].update(data_type="TYPE_INT64"),
        "output extra is not part": lambda config: config["output"].append({"name": "extra"}),
    }
    for message, change in changes.items():
        config = copy.deepcopy(model_config())
        change(config)
        with pytest.raises(ConfigError, match=message):
            read(config)
