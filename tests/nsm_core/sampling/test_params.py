from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from nsm_core.errors import InvalidRequest
from nsm_core.sampling.params import MAX_STOP_CHARS, MAX_STOP_STRINGS, SamplingParams, validate_for_vocab

BAD_VALUES: list[tuple[str, Any, str, str]] = [  # field, value, the limit and what was given, as the message says them
    ("max_tokens", 0, "at least 1", "0"),
    ("max_tokens", -5, "at least 1", "-5"),
    ("max_tokens", math.inf, "whole number", "inf"),
    ("max_tokens", True, "whole number", "True"),
    ("temperature", -0.1, "[0, 2]", "-0.1"),
    ("temperature", 2.01, "[0, 2]", "2.01"),
    ("temperature", math.nan, "[0, 2]", "nan"),
    ("temperature", math.inf, "[0, 2]", "inf"),
    ("top_p", 0.0, "(0, 1]", "0.0"),
    ("top_p", 1.5, "(0, 1]", "1.5"),
    ("top_p", math.nan, "(0, 1]", "nan"),
    ("top_k", -1, "[0, 2147483647]", "-1"),
    ("top_k", 1.5, "whole number", "1.5"),
    ("top_k", math.nan, "whole number", "nan"),
    ("min_p", -0.5, "[0, 1]", "-0.5"),
    ("min_p", math.nan, "[0, 1]", "nan"),
    ("min_p", 1.1, "[0, 1]", "1.1"),
    ("repetition_penalty", 0.0, "(0, 10]", "0.0"),
    ("repetition_penalty", -1.0, "(0, 10]", "-1.0"),
    ("repetition_penalty", math.inf, "(0, 10]", "inf"),
    ("repetition_penalty", math.nan, "(0, 10]", "nan"),
    ("presence_penalty", 2.5, "[-2, 2]", "2.5"),
    ("presence_penalty", -math.inf, "[-2, 2]", "-inf"),
    ("presence_penalty", math.nan, "[-2, 2]", "nan"),
    ("frequency_penalty", -2.5, "[-2, 2]", "-2.5"),
    ("frequency_penalty", math.nan, "[-2, 2]", "nan"),
    ("logit_bias", {3: 101.0}, "[-100, 100]", "101.0"),
    ("logit_bias", {3: math.nan}, "[-100, 100]", "nan"),
    ("logit_bias", {3: -math.inf}, "[-100, 100]", "-inf"),
    ("seed", -1, str(2**64 - 1), "-1"),
    ("seed", 2**64, str(2**64 - 1), str(2**64)),
    ("seed", math.nan, "whole number", "nan"),
    ("choice_index", -1, "[0,", "-1"),
    ("stop", ("",), "non-empty", '[""]'),
    ("stop", tuple(str(i) for i in range(MAX_STOP_STRINGS + 1)), str(MAX_STOP_STRINGS), str(MAX_STOP_STRINGS + 1)),
    ("stop", ("x" * (MAX_STOP_CHARS + 1),), str(MAX_STOP_CHARS), str(MAX_STOP_CHARS + 1)),
    ("stop", ("a\ud800",), "Unicode", r"\ud800"),
    ("logprobs", -1, "[0, 20]", "-1"),
    ("logprobs", 21, "[0, 20]", "21"),
]


@pytest.mark.parametrize(
    ("field", "value", "limit", "given"), BAD_VALUES, ids=[f"{c[0]}-{str(c[1])[:20]}" for c in BAD_VALUES]
)
def test_a_bad_value_is_refused_by_name_limit_and_value(field: str, value: Any, limit: str, given: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**{field: value})
    message = str(caught.value)
    assert caught.value.param == field
    assert message.startswith(f"{field} must be ")
    assert "\n" not in message
    assert limit in message.partition(", got ")[0]
    assert given in message.partition(", got ")[2]


def test_limits_are_inside() -> None:
    for fields in (
        {"max_tokens": 1, "temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "seed": 0, "logprobs": 0},
        {"temperature": 2.0, "top_p": 1e-9, "top_k": 10**9, "min_p": 1.0, "seed": 2**64 - 1, "logprobs": 20},
        {"repetition_penalty": 10.0, "presence_penalty": -2.0, "frequency_penalty": 2.0, "logit_bias": {0: -100.0}},
        {"repetition_penalty": 1e-9, "stop": ("é" * MAX_STOP_CHARS,) * MAX_STOP_STRINGS, "choice_index": 127},
    ):
        params = SamplingParams(**fields)
        assert all(getattr(params, name) == value for name, value in fields.items())


def test_params_cannot_be_changed() -> None:
    params = SamplingParams()
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.seed = 1  # type: ignore[misc]
    with pytest.raises(TypeError):
        params.logit_bias[1] = 2.0  # type: ignore[index]


def test_is_greedy_has_penalties_and_is_plain_follow_the_values() -> None:
    assert SamplingParams(temperature=0.0).is_greedy
    assert not SamplingParams().is_greedy
    assert not SamplingParams(logit_bias={1: 1.0}).has_penalties
    assert SamplingParams(repetition_penalty=1.1).has_penalties
    assert SamplingParams(presence_penalty=-0.1).has_penalties
    assert SamplingParams(frequency_penalty=0.1).has_penalties
    assert SamplingParams(temperature=0.0, top_k=3).is_plain
    for change in ({"logprobs": 0}, {"logit_bias": {1: 1.0}}, {"presence_penalty": 0.1}):
        assert not SamplingParams(**change).is_plain  # type: ignore[arg-type]


@pytest.mark.parametrize("token_id", [-1, 300, 2**40])
@pytest.mark.parametrize("field", ["logit_bias", "stop_token_ids"])
def test_token_ids_outside_the_vocabulary_are_refused(field: str, token_id: int) -> None:
    fields: dict[str, Any] = {"logit_bias": {5: 1.0, token_id: 1.0}, "stop_token_ids": (5, token_id)}
    with pytest.raises(InvalidRequest) as caught:
        validate_for_vocab(SamplingParams(**{field: fields[field]}), vocab_size=300)
    assert caught.value.param == field
    assert str(caught.value) == f"{field} must be made of token ids in [0, 299], got {token_id}"


def test_token_ids_of_the_vocabulary_are_accepted() -> None:
    validate_for_vocab(SamplingParams(logit_bias={0: 1.0, 299: -1.0}, stop_token_ids=(0, 299)), vocab_size=300)


def test_another_seed_changes_nothing_else() -> None:
    params = SamplingParams(max_tokens=9, temperature=0.3, stop=("a",), logit_bias={7: 1.0}, seed=1, logprobs=2)
    assert params.with_seed(5) == dataclasses.replace(params, seed=5)
    assert params.seed == 1
