"""Tools in bodies: their definitions, the choice among them, calls and results in messages."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from nsm_core.chat_template import ChatTemplate
from nsm_core.errors import InvalidRequest
from nsm_core.grammars.grammar import Grammar
from nsm_core.grammars.tool_calls import Tool, tools_grammar
from service.schemas.strict import closed, closed_if_possible, read_strict
from service.web.errors import shown

MAX_TOOLS = 128
TOOL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
CHOICES = ("none", "auto", "required")
TOOLS_SCHEMA = {
    "type": "array",
    "maxItems": MAX_TOOLS,
    "items": {"type": "object", "properties": {"type": {"const": "function"}}, "required": ["type"]},
    "description": "functions that the model may call: docs/structured-output.md",
}
CHOICE_SCHEMA = {
    "description": '"none", "auto", "required", or a function',
    "anyOf": [{"enum": list(CHOICES)}, {"type": "object"}],
}
FUNCTION_FIELDS = {"name", "description", "parameters", "strict"}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """The tools that an answer may call; none: it is a text. `is_forced`: it is a call, and no text."""

    tools: tuple[Tool, ...] = ()
    is_forced: bool = False
    has_many: bool = True
    chosen: str | None = None

    def to_grammar(self, form: Grammar | None, template: ChatTemplate) -> Grammar | None:
        """The form of an answer that may call them, or `form` where there are none."""
        if not self.tools:
            return form
        allowed = [tool for tool in self.tools if self.chosen in (None, tool.name)]
        return tools_grammar(
            allowed,
            need="required" if self.is_forced else "auto",
            has_many=self.has_many and self.chosen is None,
            calls=template.tool_form,
            form=form,
            prefix=template.answer_prefix,
        )


def read_tools(tools: Any, choice: Any, *, has_many: bool, nested: bool) -> ToolUse:
    """`nested`: a function lies in an object of its own, as in chat. Otherwise, in responses, it lies beside the type
    and is strict by default where it can be. Raises InvalidRequest.
    """
    if not isinstance(tools, list) or len(tools) > MAX_TOOLS:
        given = f"{len(tools)} of them" if isinstance(tools, list) else shown(tools)
        raise InvalidRequest(f"tools must be a list of at most {MAX_TOOLS} functions, got {given}", param="tools")
    read = tuple(_read_tool(tool, f"tools[{index}]", nested=nested) for index, tool in enumerate(tools))
    names = [tool.name for tool in read]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise InvalidRequest(f"tools must have different names, got {shown(name)} twice", param=f"tools[{index}]")
    chosen = _read_choice(choice, names, nested=nested)
    if chosen == "none" or not read:
        return ToolUse()
    return ToolUse(
        tools=read,
        is_forced=chosen != "auto",
        has_many=has_many,
        chosen=None if chosen in CHOICES else choice_name(choice, nested=nested),
    )


def choice_name(choice: Any, *, nested: bool) -> str | None:
    """The function that a choice names; None for one that names none."""
    function = choice.get("function") if nested and isinstance(choice, dict) else choice
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) and isinstance(choice, dict) and choice.get("type") == "function" else None


def check_arguments(arguments: Any) -> str:
    """A call's arguments as the model wrote them. Raises ValueError for anything but the text of a JSON object."""
    try:
        is_object = isinstance(arguments, str) and isinstance(json.loads(arguments), dict)
    except (ValueError, RecursionError):
        is_object = False
    if not is_object:
        raise ValueError("must have calls whose arguments are a JSON object as a string")
    return str(arguments)


def _read_tool(tool: Any, param: str, *, nested: bool) -> Tool:
    if not isinstance(tool, dict):
        raise InvalidRequest(f"{param} must be an object, got {shown(tool)}", param=param)
    if tool.get("type") != "function":
        message = f'{param}.type must be "function", got {shown(tool.get("type"))}'
        raise InvalidRequest(message, param=f"{param}.type", code="unsupported_parameter")
    function, where = (tool.get("function"), f"{param}.function") if nested else (_without_type(tool), param)
    if not isinstance(function, dict):
        raise InvalidRequest(f"{where} must be an object, got {shown(function)}", param=where)
    for name in {**(tool if nested else {}), **function}:
        if name not in FUNCTION_FIELDS | ({"type", "function"} if nested else set()):
            raise InvalidRequest(f"unknown field {shown(name)} in {where}", param=f"{where}.{name}")
    is_strict = read_strict(function.get("strict"), f"{where}.strict")
    of_parameters = f"{where}.parameters"
    parameters = _checked_parameters(function.get("parameters"), of_parameters)
    return Tool(
        name=_checked_name(function.get("name"), f"{where}.name"),
        description=_checked_description(function.get("description"), f"{where}.description"),
        parameters=_closed(parameters, of_parameters, is_strict=is_strict, by_default=not nested),
        param=of_parameters,
    )


def _without_type(tool: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in tool.items() if name != "type"}


def _checked_name(name: Any, param: str) -> str:
    if not isinstance(name, str) or not TOOL_NAME.fullmatch(name):
        raise InvalidRequest(f"{param} must be 1 to 64 of A-Z a-z 0-9 _ . and -, got {shown(name)}", param=param)
    return name


def _checked_description(text: Any, param: str) -> str:
    if text is not None and not isinstance(text, str):
        raise InvalidRequest(f"{param} must be a string, got {shown(text)}", param=param)
    return text or ""


def _checked_parameters(schema: Any, param: str) -> dict[str, Any]:
    """A call's arguments are an object, whether or not the schema says so; without a schema, an empty one."""
    if schema is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    if not isinstance(schema, dict) or schema.get("type", "object") != "object":
        raise InvalidRequest(f"{param} must be a JSON schema of an object, got {shown(schema)}", param=param)
    return {"type": "object", **schema}


def _closed(schema: dict[str, Any], param: str, *, is_strict: bool | None, by_default: bool) -> dict[str, Any]:
    try:
        if is_strict is None and by_default:
            return closed_if_possible(schema, param)
        return closed(schema, param) if is_strict else schema
    except RecursionError as error:
        raise InvalidRequest(f"{param} is nested too deeply", param=param) from error


def _read_choice(choice: Any, names: Sequence[str], *, nested: bool) -> str:
    """One of CHOICES, or a tool's name."""
    if choice is None:
        return "auto"
    name = choice if isinstance(choice, str) and choice in CHOICES else choice_name(choice, nested=nested)
    if name is None:
        expected = f"one of {', '.join(CHOICES)}, or an object that names a function"
        raise InvalidRequest(f"tool_choice must be {expected}, got {shown(choice)}", param="tool_choice")
    if name not in CHOICES and name not in names:
        raise InvalidRequest(f"tool_choice must name one of tools, got {shown(name)}", param="tool_choice")
    if name == "required" and not names:
        raise InvalidRequest("tool_choice required needs tools", param="tool_choice")
    return name
