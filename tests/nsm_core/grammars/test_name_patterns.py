"""`patternProperties` beside closed objects: those at which llguidance would come to a dead end are refused."""

from __future__ import annotations

from typing import Any

import pytest

from nsm_core.errors import InvalidRequest
from nsm_core.grammars.compiler import GrammarCompiler
from nsm_core.grammars.grammar import json_schema_grammar
from nsm_core.tokenizer import Tokenizer

ONLY_A = {"type": "object", "patternProperties": {"^a$": {"const": 1}}, "additionalProperties": False}
SCORE = {**ONLY_A, "properties": {"score": {"type": "integer"}}}


@pytest.fixture(scope="module")
def compiler(tiny_tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tiny_tokenizer)


@pytest.mark.parametrize(
    "schema",
    [
        {**ONLY_A, "required": ["a"]},
        {**SCORE, "patternProperties": {"^score$": {"type": "integer"}}},
        {"type": "array", "items": {**ONLY_A, "properties": {"a": {}}}},
    ],
)
def test_P10_patterns_that_leave_no_further_name_are_refused(compiler: GrammarCompiler, schema: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="patternProperties beside additionalProperties: false") as caught:
        compiler.check(json_schema_grammar(schema, param="p"))
    assert (caught.value.param, caught.value.code) == ("p", "invalid_grammar")


@pytest.mark.parametrize(
    "schema",
    [
        ONLY_A,
        {**SCORE, "patternProperties": {"^s": {"type": "integer"}}, "required": ["score"]},
        {**SCORE, "patternProperties": {"^x-": {"type": "string", "maxLength": 3}}},
        {**ONLY_A, "additionalProperties": {"type": "integer"}, "required": ["a"]},
    ],
)
def test_patterns_with_further_names_are_taken(compiler: GrammarCompiler, schema: dict[str, Any]) -> None:
    compiler.check(json_schema_grammar(schema, param="p"))
