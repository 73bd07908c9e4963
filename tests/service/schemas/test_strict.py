from __future__ import annotations

from typing import Any

import pytest

from nsm_core.errors import InvalidRequest
from service.schemas.strict import closed, closed_if_possible
from service.schemas.tools import read_tools

INNER = {"type": "object", "properties": {"a": {"type": "integer"}}}
CLOSED = {**INNER, "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (INNER, CLOSED),
        (CLOSED, CLOSED),
        ({"type": ["object", "null"]}, {"type": ["object", "null"], "additionalProperties": False}),
        ({"type": "array", "items": INNER}, {"type": "array", "items": CLOSED}),
        ({"prefixItems": [INNER], "items": False}, {"prefixItems": [CLOSED], "items": False}),
        ({"anyOf": [INNER, {"type": "null"}]}, {"anyOf": [CLOSED, {"type": "null"}]}),
        ({"allOf": [INNER]}, {"allOf": [CLOSED]}),
        ({"$ref": "#/$defs/x", "$defs": {"x": INNER}}, {"$ref": "#/$defs/x", "$defs": {"x": CLOSED}}),
        ({"properties": {"items": INNER}}, {"properties": {"items": CLOSED}, "additionalProperties": False}),
        ({"const": INNER}, {"const": INNER}),  # a value, no schema
    ],
)
def test_every_object_of_a_strict_schema_is_closed(schema: dict[str, Any], expected: dict[str, Any]) -> None:
    assert closed(schema, "schema") == expected


@pytest.mark.parametrize(
    ("schema", "param", "words"),
    [
        ({"properties": {"a": {"additionalProperties": True}}}, "p.properties.a.additionalProperties", "false with"),
        ({"items": {"additionalProperties": INNER}}, "p.items.additionalProperties", "set strict to false"),
        ({"type": "object", "patternProperties": {"^a$": {"const": 1}}}, "p.patternProperties", "not supported with"),
        ({"anyOf": [{"allOf": [INNER, INNER]}]}, "p.anyOf[0].allOf", "one part with strict: true, got 2"),
    ],
)
def test_P10_a_schema_that_contradicts_strict_is_refused_by_its_field(
    schema: dict[str, Any], param: str, words: str
) -> None:
    with pytest.raises(InvalidRequest, match=words) as caught:
        closed(schema, "p")
    assert caught.value.param == param


@pytest.mark.parametrize("nested", [True, False])
def test_a_tool_is_closed_if_it_is_strict(nested: bool) -> None:
    def parameters_of(**fields: Any) -> Any:
        function = {"name": "f", "parameters": INNER, **fields}
        tool = {"type": "function", **({"function": function} if nested else function)}
        return read_tools([tool], None, has_many=False, nested=nested).tools[0].parameters

    assert parameters_of(strict=True) == CLOSED
    assert parameters_of(strict=False) == INNER
    assert parameters_of() == parameters_of(strict=None) == (INNER if nested else CLOSED)  # as OpenAI's two APIs
    with pytest.raises(InvalidRequest, match=r"strict must be a boolean, got \"yes\""):
        parameters_of(strict="yes")


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "patternProperties": {"^a$": {"const": 1}}},
        {"type": "object", "additionalProperties": {"type": "integer"}},
        {"type": "object", "properties": {"any": {"type": "object"}}},
        {"type": "object", "properties": {"a": {}}, "required": ["a", "b"]},
        {"type": "object", "properties": {"a": {}}, "anyOf": [{"properties": {"b": {}}, "required": ["b"]}]},
        {"type": "object", "allOf": [INNER, {"properties": {"b": {}}}]},
        {"type": "object", "properties": {"a": {"anyOf": [{"items": {"additionalProperties": True}}]}}},
    ],
)
def test_a_schema_that_cannot_be_closed_stays_as_it_is_by_default(schema: dict[str, Any]) -> None:
    assert closed_if_possible(schema, "p") == schema
    nested = {"type": "object", "properties": {"x": {"$ref": "#/$defs/x"}}, "$defs": {"x": schema}}
    assert closed_if_possible(nested, "p") == nested
