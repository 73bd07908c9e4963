"""Forms that were made to take time and memory without end."""

from __future__ import annotations

import itertools
import json
from typing import Any

from nsm_core.grammars.grammar import Grammar


def _nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def _doubling(depth: int) -> dict[str, Any]:
    """Each definition names the next one twice: a schema that unfolds into 2^depth parts."""
    names = [f"d{number}" for number in range(depth)]
    defs: dict[str, Any] = {
        name: {"type": "array", "prefixItems": [{"$ref": f"#/$defs/{after}"}] * 2, "minItems": 2}
        for name, after in itertools.pairwise(names)
    }
    defs[names[-1]] = {"enum": ["x", "y"]}
    return {"$ref": "#/$defs/d0", "$defs": defs}


def _schema(schema: dict[str, Any]) -> Grammar:
    return Grammar(kind="json_schema", source=json.dumps(schema))


HOSTILE: dict[str, Grammar] = {
    "nested 40 deep": _schema(_nested(40)),
    "nested 900 deep": Grammar(kind="json_schema", source='{"items":' * 900 + "{}" + "}" * 900),
    "a loop of references": _schema({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}),
    "a recursive list": _schema(
        {"$ref": "#/$defs/a", "$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/a"}}}}
    ),
    "doubling references": _schema(_doubling(24)),
    "a huge enum": _schema({"enum": [f"value-{number * 7919 % 1000003}" for number in range(14_000)]}),
    "a thousand properties": _schema(
        {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(1000)}}
    ),
    "nested alternatives": _schema(
        {"anyOf": [{"type": "object", "properties": {f"p{n}": {"type": "string"}}} for n in range(500)]}
    ),
    "long strings": _schema({"type": "string", "minLength": 900_000, "maxLength": 1_000_000}),
    "long lists": _schema({"type": "array", "items": {"type": "integer"}, "minItems": 1_000_000}),
    "a pattern of counts": _schema({"type": "string", "pattern": "^((a{1,100}){1,100}){1,100}$"}),
    "many patterns at once": _schema(
        {"allOf": [{"type": "string", "pattern": f"(a|b)*a(a|b){{{n}}}"} for n in range(2, 16)]}
    ),
    "explosive regex": Grammar(kind="regex", source="(a|b|ab)*(a|b){12}c(a|b|ab)*(.|a){40}"),
    "regex of counts": Grammar(kind="regex", source="((((.{1,50}){1,50}){1,50}){1,50}){1,50}"),
    "regex of a subset": Grammar(kind="regex", source="(.*a.{18}b.{18})+"),
    "ambiguous rules": Grammar(kind="lark", source='start: s\ns: s s | s s s | "a" | ""'),
    "a deep rule": Grammar(
        kind="lark",
        source="start: a0\n" + "\n".join(f'a{n}: a{n + 1} a{n + 1} | "x"' for n in range(2000)) + '\na2000: "y"',
    ),
}
