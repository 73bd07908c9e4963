"""The schemas within a JSON schema, by the keywords that llguidance takes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

# Keywords whose value is a schema or a list of some, and those that have schemas by name
OF_SCHEMAS = ("items", "prefixItems", "contains", "additionalProperties", "anyOf", "oneOf", "allOf")
BY_NAME = ("properties", "patternProperties", "$defs", "definitions")


def subschemas(schema: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The schema, then all that it holds. Raises RecursionError."""
    yield schema
    for name, value in schema.items():
        if name in BY_NAME and isinstance(value, dict):
            parts = list(value.values())
        else:
            parts = value if isinstance(value, list) else [value]
            parts = parts if name in OF_SCHEMAS else []
        for part in parts:
            if isinstance(part, dict):
                yield from subschemas(part)
