"""Fields that bind an answer to a form: OpenAI's `response_format`, vLLM's `guided_*` and `structured_outputs`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Annotated, Any

from pydantic import Field, WithJsonSchema, model_validator

from nsm_core.errors import InvalidRequest
from nsm_core.grammars.grammar import Grammar, json_schema_grammar
from service.schemas.common import RequestBody
from service.schemas.strict import closed, read_strict
from service.web.errors import shown

MAX_CHOICE_TEXTS = 1024
RESPONSE_FORMAT_SCHEMA = {
    "description": "the form of the answer: docs/structured-output.md",
    "type": "object",
    "properties": {
        "type": {"enum": ["text", "json_object", "json_schema"]},
        "json_schema": {"type": "object", "properties": {"name": {"type": "string"}, "schema": {"type": "object"}}},
    },
    "required": ["type"],
}
ANY_OBJECT = {"type": "object"}
# Of a format that names a schema; only `schema` changes what may come
NAMED_FIELDS = {"name", "description", "schema", "strict"}


class StructuredFields(RequestBody):
    """At most one of them may be set."""

    response_format: Annotated[Any, WithJsonSchema(RESPONSE_FORMAT_SCHEMA)] = None
    guided_json: Annotated[Any, WithJsonSchema({"description": "a JSON schema, or one as text"})] = None
    guided_regex: str | None = Field(default=None, description="a regular expression that the whole answer matches")
    guided_choice: list[str] | None = Field(default=None, description="the answer is one of these texts")
    guided_grammar: str | None = Field(default=None, description="a grammar in llguidance's dialect of Lark")
    structured_outputs: Annotated[
        Any, WithJsonSchema({"type": "object", "description": "one of json, json_object, regex, choice, grammar"})
    ] = None

    @model_validator(mode="after")
    def _read_grammar(self) -> StructuredFields:
        self.to_grammar()
        return self

    def to_grammar(self, *, prefix: str = "") -> Grammar | None:
        """The form of the answer, after a `prefix` that the chat template asks for. Raises InvalidRequest."""
        found = [
            grammar
            for name, read in _READERS.items()
            if (value := getattr(self, name)) is not None and (grammar := read(value, name, prefix)) is not None
        ]
        if len(found) > 1:
            message = f"{found[0].param} excludes {found[1].param}: an answer has one form"
            raise InvalidRequest(message, param=found[1].param)
        return found[0] if found else None


def read_format(value: Any, param: str, prefix: str, *, nested: bool = True) -> Grammar | None:
    """An OpenAI format. `nested`: whether its schema lies in an object of its own, as in chat, or beside the type."""
    kind = value.get("type") if isinstance(value, dict) else None
    if kind not in ("text", "json_object", "json_schema"):
        expected = 'an object whose type is "text", "json_object" or "json_schema"'
        raise InvalidRequest(f"{param} must be {expected}, got {shown(value)}", param=param)
    if kind != "json_schema":
        _refuse_unknown(value, {"type"}, param)
        return None if kind == "text" else json_schema_grammar(ANY_OBJECT, param=param, prefix=prefix)
    where, named = param, {name: part for name, part in value.items() if name != "type"}
    if nested:
        _refuse_unknown(value, {"type", "json_schema"}, param)
        where, named = f"{param}.json_schema", value.get("json_schema")
        if not isinstance(named, dict):
            raise InvalidRequest(f"{where} must be an object with a schema, got {shown(named)}", param=where)
    _refuse_unknown(named, NAMED_FIELDS, where)
    is_strict = bool(read_strict(named.get("strict"), f"{where}.strict"))
    return _read_schema(named.get("schema"), f"{where}.schema", prefix, is_strict=is_strict)


def _read_schema(value: Any, param: str, prefix: str, *, is_strict: bool = False) -> Grammar:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"{param} must be a JSON schema, got a text that is no JSON", param=param) from error
    if not isinstance(value, dict):
        raise InvalidRequest(f"{param} must be a JSON schema (an object), got {shown(value)}", param=param)
    try:
        return json_schema_grammar(closed(value, param) if is_strict else value, param=param, prefix=prefix)
    except RecursionError as error:
        raise InvalidRequest(f"{param} is nested too deeply", param=param) from error


def _read_regex(value: Any, param: str, prefix: str) -> Grammar:
    return Grammar(kind="regex", source=_text(value, param), prefix=prefix, param=param)


def _read_lark(value: Any, param: str, prefix: str) -> Grammar:
    return Grammar(kind="lark", source=_text(value, param), prefix=prefix, param=param)


def _read_choice(value: Any, param: str, prefix: str) -> Grammar:
    is_list = isinstance(value, list) and all(isinstance(text, str) and text for text in value)
    if not is_list or not 1 <= len(value) <= MAX_CHOICE_TEXTS:
        expected = f"a list of 1 to {MAX_CHOICE_TEXTS} texts, none of them empty"
        raise InvalidRequest(f"{param} must be {expected}, got {shown(value)}", param=param)
    return Grammar(kind="choice", source=json.dumps(value, ensure_ascii=False), prefix=prefix, param=param)


def _read_json_object(value: Any, param: str, prefix: str) -> Grammar | None:
    if not isinstance(value, bool):
        raise InvalidRequest(f"{param} must be a boolean, got {shown(value)}", param=param)
    return json_schema_grammar(ANY_OBJECT, param=param, prefix=prefix) if value else None


def _read_structured_outputs(value: Any, param: str, prefix: str) -> Grammar | None:
    if not isinstance(value, dict):
        raise InvalidRequest(f"{param} must be an object, got {shown(value)}", param=param)
    given = {name: part for name, part in value.items() if part is not None}
    _refuse_unknown(given, set(_OF_STRUCTURED_OUTPUTS), param)
    if len(given) != 1:
        expected = f"exactly one of {', '.join(_OF_STRUCTURED_OUTPUTS)}"
        raise InvalidRequest(f"{param} must have {expected}, got {shown(sorted(given))}", param=param)
    ((name, part),) = given.items()
    return _OF_STRUCTURED_OUTPUTS[name](part, f"{param}.{name}", prefix)


def _text(value: Any, param: str) -> str:
    if not isinstance(value, str) or not value:
        raise InvalidRequest(f"{param} must be a text that is not empty, got {shown(value)}", param=param)
    return value


def _refuse_unknown(value: Mapping[str, Any], known: set[str], param: str) -> None:
    for name in value:
        if name not in known:
            path = f"{param}.{name}"
            message = f"unknown field {shown(name)} in {param}; known: {', '.join(sorted(known))}"
            raise InvalidRequest(message, param=path, code="unknown_parameter")


Reader = Callable[[Any, str, str], Grammar | None]
_OF_STRUCTURED_OUTPUTS: Mapping[str, Reader] = {
    "json": _read_schema,
    "json_object": _read_json_object,
    "regex": _read_regex,
    "choice": _read_choice,
    "grammar": _read_lark,
}
_READERS: Mapping[str, Reader] = {
    "response_format": read_format,
    "guided_json": _read_schema,
    "guided_regex": _read_regex,
    "guided_choice": _read_choice,
    "guided_grammar": _read_lark,
    "structured_outputs": _read_structured_outputs,
}
