"""JSON schemas whose every answer is short, for models that write at random; and answers held against them."""

from __future__ import annotations

import json
from typing import Any

import jsonschema

ANSWER = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 6},
        "kind": {"enum": ["tale", "novel", "poem"]},
        "year": {"type": "integer", "minimum": 1800, "maximum": 1900},
        "is_long": {"type": "boolean"},
        "marks": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "maxItems": 3},
    },
    "required": ["title", "kind", "year", "is_long", "marks"],
    "additionalProperties": False,
}
POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer", "minimum": -9, "maximum": 9}, "y": {"$ref": "#/$defs/y"}},
    "required": ["x", "y"],
    "additionalProperties": False,
    "$defs": {"y": {"anyOf": [{"type": "null"}, {"type": "boolean"}]}},
}
TREE = {
    "type": "array",
    "items": {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 1, "maxItems": 2},
    "minItems": 1,
    "maxItems": 3,
}
SCHEMAS: dict[str, dict[str, Any]] = {"answer": ANSWER, "point": POINT, "tree": TREE}
MAX_TOKENS = 200  # no answer to one of them is longer, whatever the tokenizer


def check_json(text: str, schema: dict[str, Any]) -> Any:
    """The value of a text that is JSON as the schema wants it."""
    value = json.loads(text)
    jsonschema.validate(value, schema)
    return value
