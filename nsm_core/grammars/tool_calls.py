"""How tools stand in a chat's text: their list, a model's calls, their results, and the grammar that holds calls to it.

Calls are written as models of the Hermes family write them, for every chat template: a model that was not trained on
them is held to the form by the grammar all the same.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from nsm_core.chat_template import ChatMessage
from nsm_core.grammars.grammar import Grammar

OPEN, CLOSE = "<tool_call>", "</tool_call>"
NAME_KEY, ARGUMENTS_KEY = '{"name": ', ', "arguments": '
Need = Literal["auto", "required"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """`parameters`: the JSON schema of its arguments, which are an object."""

    name: str
    description: str
    parameters: Mapping[str, Any]


def tools_text(tools: Sequence[Tool]) -> str:
    """What a system message says of them."""
    lines = [
        json.dumps(
            {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)},
            ensure_ascii=False,
        )
        for tool in tools
    ]
    form = call_text("NAME", '{"PARAMETER": "VALUE"}')
    return "\n".join(["These tools can be called:", *lines, f"A call is written {form} and its result comes next."])


def call_text(name: str, arguments: str) -> str:
    """A call as the model writes it; `arguments`: JSON."""
    return f"{OPEN}{NAME_KEY}{json.dumps(name, ensure_ascii=False)}{ARGUMENTS_KEY}{arguments}}}{CLOSE}"


def answer_text(content: str, calls: Sequence[tuple[str, str]]) -> str:
    """An assistant's message: its text, then its calls (name, arguments)."""
    return content + "\n".join(call_text(name, arguments) for name, arguments in calls)


def results_message(results: Sequence[str]) -> ChatMessage:
    """The results of the calls before it, in their order."""
    return ChatMessage("user", "\n".join(f"<tool_response>{result}</tool_response>" for result in results))


def with_tools(messages: Sequence[ChatMessage], tools: Sequence[Tool]) -> list[ChatMessage]:
    """The chat with its tools in the first system message."""
    if not tools:
        return list(messages)
    text = tools_text(tools)
    if messages and messages[0].role == "system":
        return [ChatMessage("system", f"{messages[0].content}\n\n{text}"), *messages[1:]]
    return [ChatMessage("system", text), *messages]


def tools_grammar(
    tools: Sequence[Tool],
    *,
    need: Need,
    has_many: bool,
    form: Grammar | None = None,
    prefix: str = "",
    param: str = "tools",
) -> Grammar:
    """The answer is calls of these tools, several of them if `has_many`; with `auto` it may be a text instead, in
    `form` if there is one, or have a text before its calls.
    """
    source = {
        "need": need,
        "has_many": has_many,
        "tools": [[tool.name, dict(tool.parameters)] for tool in tools],
        "form": None if form is None else {"kind": form.kind, "source": form.source},
    }
    return Grammar(kind="tools", source=json.dumps(source, ensure_ascii=False), prefix=prefix, param=param)


def tools_lark(names: Sequence[str], *, need: Need, has_many: bool, has_form: bool) -> str:
    """The grammar's rules. The arguments of tool i are the rule @arguments_i, a form is @form."""
    calls = " | ".join(
        f"{_literal(f'{NAME_KEY}{json.dumps(name, ensure_ascii=False)}{ARGUMENTS_KEY}')} @arguments_{index}"
        for index, name in enumerate(names)
    )
    rules = [f"body: ({calls}) {_literal('}' + CLOSE)}", f"call: {_literal(OPEN)} body"]
    more = f" ({_literal(chr(10) + OPEN)} body)*" if has_many else ""
    if need == "required":
        return "\n".join([f"start: call{more}", *rules])
    if has_form:
        return "\n".join([f"start: @form | call{more}", *rules])
    # The first lexeme ends as soon as a call opens, so that no text ever holds that mark
    rules += [f"opened[lazy]: TEXT {_literal(OPEN)}", "TEXT: /(.|\\n)*/"]
    return "\n".join([f"start: TEXT | opened body{more}", *rules])


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
