"""`oneOf` as `anyOf`, where no value can match two of its parts.

llguidance has no `oneOf` but where it can tell the parts apart, which it does by type and by constant texts only. Here
parts also differ by any constants, and objects by a property that all of them require. Unproven ones stay `oneOf`.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from nsm_core.grammars.subschemas import BY_NAME, OF_SCHEMAS

MAX_PARTS = 256  # of one oneOf: each pair is compared
MAX_PAIRS = 1024  # of values of two parts
MAX_REFERENCES = 8  # one after the other
TYPES = frozenset(("null", "boolean", "object", "array", "number", "string"))


def with_disjoint_as_any(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema with `anyOf` for each `oneOf` of parts that exclude each other. Raises RecursionError."""
    return _rewritten(schema, schema)


def _rewritten(schema: Mapping[str, Any], root: Mapping[str, Any]) -> dict[str, Any]:
    is_any = "anyOf" not in schema and _are_disjoint(schema, root)
    return {("anyOf" if is_any and name == "oneOf" else name): _part(name, schema[name], root) for name in schema}


def _part(name: str, value: Any, root: Mapping[str, Any]) -> Any:
    if name in BY_NAME and isinstance(value, dict):
        return {key: _rewritten(part, root) if isinstance(part, dict) else part for key, part in value.items()}
    if name in OF_SCHEMAS and isinstance(value, dict):
        return _rewritten(value, root)
    if name in OF_SCHEMAS and isinstance(value, list):
        return [_rewritten(part, root) if isinstance(part, dict) else part for part in value]
    return value


def _are_disjoint(schema: Mapping[str, Any], root: Mapping[str, Any]) -> bool:
    parts = schema.get("oneOf")
    if not isinstance(parts, list) or not 1 <= len(parts) <= MAX_PARTS:
        return False
    found = [_target(part, root) for part in parts]
    around = _types(schema)
    return all(_exclude(one, other, around, root) for one, other in itertools.combinations(found, 2))


def _exclude(one: Any, other: Any, around: frozenset[str], root: Mapping[str, Any]) -> bool:
    """Whether no value of the types `around` them matches both."""
    if _differ(one, other, around):
        return True
    if around & _types(one) & _types(other) != {"object"}:
        return False
    return any(
        _differ(_property(one, name, root), _property(other, name, root), TYPES)
        for name in _required(one) & _required(other)
    )


def _differ(one: Any, other: Any, around: frozenset[str]) -> bool:
    """By their types, or by the values that both name."""
    if not around & _types(one) & _types(other):
        return True
    values, others = _values(one), _values(other)
    if values is None or others is None or len(values) * len(others) > MAX_PAIRS:
        return False
    return not any(_is_same(value, other) for value, other in itertools.product(values, others))


def _values(schema: Any) -> Sequence[Any] | None:
    """The only values that match, where the schema names them."""
    if not isinstance(schema, dict):
        return None
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) else None


def _is_same(one: Any, other: Any) -> bool:
    """As JSON: 1 is 1.0, and not true. Lists and objects count as the same: they are not looked into."""
    if isinstance(one, dict | list) or isinstance(other, dict | list):
        return type(one) is type(other)
    return bool(one == other) and isinstance(one, bool) == isinstance(other, bool)


def _types(schema: Any) -> frozenset[str]:
    """The types that a value may have; an integer is a number."""
    if not isinstance(schema, dict):
        return TYPES
    values = _values(schema)
    if values is not None:
        return frozenset(_type_of(value) for value in values)
    given = schema.get("type")
    names = given if isinstance(given, list) else [given]
    known = frozenset("number" if name == "integer" else name for name in names if isinstance(name, str))
    return known & TYPES or TYPES


def _type_of(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    kinds: Mapping[type, str] = {int: "number", float: "number", str: "string", list: "array", dict: "object"}
    return kinds[type(value)]


def _required(schema: Any) -> set[str]:
    names = schema.get("required") if isinstance(schema, dict) else None
    return {name for name in names if isinstance(name, str)} if isinstance(names, list) else set()


def _property(schema: Any, name: str, root: Mapping[str, Any]) -> Any:
    properties = schema.get("properties")
    return _target(properties.get(name), root) if isinstance(properties, dict) else None


def _target(schema: Any, root: Mapping[str, Any]) -> Any:
    """What a schema that is a reference within the document refers to, or the schema itself."""
    for _ in range(MAX_REFERENCES):
        reference = schema.get("$ref") if isinstance(schema, dict) else None
        if not isinstance(reference, str) or not reference.startswith("#/"):
            break
        schema = _at(root, reference[2:].split("/"))
    return schema


def _at(root: Mapping[str, Any], names: Sequence[str]) -> Any:
    found: Any = root
    for name in names:
        found = found.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(found, dict) else None
    return found
