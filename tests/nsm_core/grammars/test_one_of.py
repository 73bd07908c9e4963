"""`oneOf` whose parts exclude each other, through the library that lacks it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from nsm_core.errors import InvalidRequest
from nsm_core.grammars.compiler import GrammarCompiler
from nsm_core.grammars.grammar import json_schema_grammar
from nsm_core.grammars.one_of import with_disjoint_as_any
from nsm_core.tokenizer import Tokenizer


def with_kind(kind: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"kind": kind}, "required": ["kind"], "additionalProperties": False}


ONE, TWO = with_kind({"const": 1}), with_kind({"enum": [2, 3]})
REFERENCES = [{"$ref": "#/$defs/one"}, {"$ref": "#/$defs/two"}]
DISJOINT = [
    ({"oneOf": [{"const": 1}, {"const": 2}]}, 2),
    ({"oneOf": [{"const": 1}, {"const": True}, {"const": None}, {"const": "1"}, {"type": "array"}]}, True),
    ({"oneOf": [{"enum": [1, 2]}, {"const": 2.5}, {"type": "string", "maxLength": 3}]}, 2.5),
    ({"oneOf": [ONE, TWO, {"type": "null"}]}, {"kind": 3}),
    ({"oneOf": REFERENCES, "$defs": {"one": ONE, "two": TWO}}, {"kind": 1}),
    ({"oneOf": [with_kind({"type": "integer"}), with_kind({"type": "boolean"})]}, {"kind": False}),
    ({"type": "object", "oneOf": [{key: ONE[key] for key in ("properties", "required")}, TWO]}, {"kind": 1}),
    ({"type": "array", "items": {"oneOf": [ONE, TWO]}}, [{"kind": 1}, {"kind": 2}]),
]
OVERLAPPING = [
    {"oneOf": [{"const": 1}, {"const": 1.0}]},
    {"oneOf": [{"type": "integer"}, {"type": "number"}]},
    {"oneOf": [{"const": 1}, {"type": "integer"}]},
    {"oneOf": [ONE, with_kind({"enum": [1, 2]})]},
    {"oneOf": [ONE, {**TWO, "required": []}]},
    {"oneOf": [{"properties": ONE["properties"], "required": ["kind"]}, TWO, {"type": "string"}]},  # or any text
    {"oneOf": [{"const": [1]}, {"const": [1]}]},
    {"oneOf": [{"$ref": "#"}, {"const": 1}]},
]


@pytest.fixture(scope="module")
def compiler(tiny_tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tiny_tokenizer)


@pytest.mark.parametrize(("schema", "value"), DISJOINT)
def test_parts_that_exclude_each_other_are_alternatives(
    compiler: GrammarCompiler, tiny_tokenizer: Tokenizer, schema: dict[str, Any], value: Any
) -> None:
    matcher = compiler.matcher(json_schema_grammar(schema, param="p"))
    for token_id in tiny_tokenizer.encode(json.dumps(value)):
        matcher.advance(token_id)
    assert matcher.is_complete


@pytest.mark.parametrize("schema", OVERLAPPING)
def test_parts_that_may_overlap_are_left_to_the_library(schema: dict[str, Any]) -> None:
    assert with_disjoint_as_any(schema) == schema


def test_P10_a_refused_one_of_is_told_with_its_remedy(compiler: GrammarCompiler) -> None:
    with pytest.raises(InvalidRequest, match="or use anyOf") as caught:
        compiler.matcher(json_schema_grammar({"oneOf": [ONE, ONE]}, param="p"))
    assert "coerce_one_of" not in str(caught.value)


def test_values_and_names_are_no_keywords() -> None:
    inner = {"oneOf": [{"const": 1}, {"const": 2}]}
    schema = {"const": inner, "properties": {"oneOf": {"enum": [inner]}}}
    assert with_disjoint_as_any(schema) == schema
    assert with_disjoint_as_any({"properties": {"oneOf": inner}}) == {
        "properties": {"oneOf": {"anyOf": inner["oneOf"]}}
    }
