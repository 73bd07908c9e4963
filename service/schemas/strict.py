"""`strict: true` beside a JSON schema: no object of the value has properties that the schema does not name.

OpenAI refuses such a schema unless it says `additionalProperties: false` in each object and requires every property.
Here the first is added where it is missing, and optional properties stay optional.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nsm_core.errors import InvalidRequest
from nsm_core.grammars.subschemas import BY_NAME, OF_SCHEMAS, subschemas
from service.web.errors import shown

COMBINING = {"anyOf", "oneOf", "allOf", "$ref"}  # may name further properties of the same object


def read_strict(value: Any, param: str) -> bool | None:
    """Raises InvalidRequest for anything but a boolean, or null for none."""
    if not isinstance(value, bool | None):
        raise InvalidRequest(f"{param} must be a boolean, got {shown(value)}", param=param)
    return value


def closed(schema: Mapping[str, Any], param: str) -> dict[str, Any]:
    """The schema with `additionalProperties: false` in every object.

    Raises InvalidRequest where that contradicts the schema; RecursionError for one that is nested too deeply.
    """
    if schema.get("additionalProperties", False) is not False:
        given = shown(schema["additionalProperties"])
        message = f"{param}.additionalProperties must be false with strict: true, got {given}; or set strict to false"
        raise InvalidRequest(message, param=f"{param}.additionalProperties")
    if "patternProperties" in schema:  # beside names that are closed, llguidance may allow a comma and then no name
        where = f"{param}.patternProperties"
        message = f"{where} is not supported with strict: true; name the properties, or set strict to false"
        raise InvalidRequest(message, param=where)
    parts = schema.get("allOf")
    if isinstance(parts, list) and len(parts) > 1:  # closed alone, each part would forbid the others' properties
        message = f"{param}.allOf must have one part with strict: true, got {len(parts)}; or set strict to false"
        raise InvalidRequest(message, param=f"{param}.allOf")
    found = {name: _closed_parts(name, value, f"{param}.{name}") for name, value in schema.items()}
    return {**found, "additionalProperties": False} if _is_of_objects(schema) else found


def closed_if_possible(schema: Mapping[str, Any], param: str) -> dict[str, Any]:
    """`closed`, or the schema as it is where closing it would contradict it or leave an object no property."""
    try:
        found = closed(schema, param)
    except InvalidRequest:
        return dict(schema)
    return found if _retains_properties(schema) else dict(schema)


def _retains_properties(schema: Mapping[str, Any]) -> bool:
    """Whether every object in it still has its properties when it is closed."""
    return all(_names_all_properties(part) for part in subschemas(schema) if _is_of_objects(part))


def _names_all_properties(schema: Mapping[str, Any]) -> bool:
    """Whether an object's properties are those of `properties`, and of no schema beside it."""
    properties, required = schema.get("properties"), schema.get("required", [])
    if not isinstance(properties, dict) or not isinstance(required, list) or COMBINING & schema.keys():
        return False
    return all(isinstance(name, str) and name in properties for name in required)


def _is_of_objects(schema: Mapping[str, Any]) -> bool:
    kind = schema.get("type")
    return "properties" in schema or kind == "object" or (isinstance(kind, list) and "object" in kind)


def _closed_parts(name: str, value: Any, param: str) -> Any:
    """The value of a keyword, with the schemas in it closed."""
    if name in BY_NAME and isinstance(value, dict):
        return {key: _closed_one(part, f"{param}.{key}") for key, part in value.items()}
    if name not in OF_SCHEMAS:
        return value
    if isinstance(value, list):
        return [_closed_one(part, f"{param}[{index}]") for index, part in enumerate(value)]
    return _closed_one(value, param)


def _closed_one(value: Any, param: str) -> Any:
    return closed(value, param) if isinstance(value, dict) else value
