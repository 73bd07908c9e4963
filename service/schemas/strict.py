"""`strict: true` beside a JSON schema: no object of the value has properties that the schema does not name.

OpenAI refuses such a schema unless it says `additionalProperties: false` in each object and requires every property.
Here the first is added where it is missing, and optional properties stay optional.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nsm_core.errors import InvalidRequest
from service.web.errors import shown

# Keywords whose value is a schema, or has some in a list or by name
ONE = ("items", "not", "contains")
LISTS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
BY_NAME = ("properties", "patternProperties", "$defs", "definitions")


def read_strict(value: Any, param: str) -> bool:
    """Raises InvalidRequest for anything but a boolean, or null for none."""
    if not isinstance(value, bool | None):
        raise InvalidRequest(f"{param} must be a boolean, got {shown(value)}", param=param)
    return bool(value)


def closed(schema: Mapping[str, Any], param: str) -> dict[str, Any]:
    """The schema with `additionalProperties: false` in every object.

    Raises InvalidRequest where that contradicts the schema; RecursionError for one that is nested too deeply.
    """
    if schema.get("additionalProperties", False) is not False:
        given = shown(schema["additionalProperties"])
        message = f"{param}.additionalProperties must be false with strict: true, got {given}; or set strict to false"
        raise InvalidRequest(message, param=f"{param}.additionalProperties")
    parts = schema.get("allOf")
    if isinstance(parts, list) and len(parts) > 1:  # closed alone, each part would forbid the others' properties
        message = f"{param}.allOf must have one part with strict: true, got {len(parts)}; or set strict to false"
        raise InvalidRequest(message, param=f"{param}.allOf")
    found = {name: _closed_parts(name, value, f"{param}.{name}") for name, value in schema.items()}
    return {**found, "additionalProperties": False} if _is_of_objects(schema) else found


def _is_of_objects(schema: Mapping[str, Any]) -> bool:
    kind = schema.get("type")
    return "properties" in schema or kind == "object" or (isinstance(kind, list) and "object" in kind)


def _closed_parts(name: str, value: Any, param: str) -> Any:
    """The value of a keyword, with the schemas in it closed."""
    if name in LISTS and isinstance(value, list):
        return [_closed_one(part, f"{param}[{index}]") for index, part in enumerate(value)]
    if name in BY_NAME and isinstance(value, dict):
        return {key: _closed_one(part, f"{param}.{key}") for key, part in value.items()}
    return _closed_one(value, param) if name in ONE else value


def _closed_one(value: Any, param: str) -> Any:
    return closed(value, param) if isinstance(value, dict) else value
