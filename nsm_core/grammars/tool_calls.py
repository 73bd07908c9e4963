"""How tools stand in a chat's text: their list, a model's calls, their results, and the grammar that holds calls to it.

How they stand there is the form of the chat template (`nsm_core/tool_form.py`).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from nsm_core.chat_template import ChatMessage
from nsm_core.grammars.grammar import Grammar
from nsm_core.tool_form import TOOL_FORM_OF, ToolFormName

NAME_KEY, ARGUMENTS_KEY = '{"name": ', ', "arguments": '
Need = Literal["auto", "required"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """`parameters`: the JSON schema of its arguments, which are an object. `param`: the field of the request that had
    it, which refusals name.
    """

    name: str
    description: str
    parameters: Mapping[str, Any]
    param: str = "parameters"


def tools_text(tools: Sequence[Tool], form: ToolFormName) -> str:
    """What a system message says of them."""
    objects = [
        json.dumps(
            {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)},
            ensure_ascii=False,
        )
        for tool in tools
    ]
    return TOOL_FORM_OF[form].list_tools(objects)


def call_text(name: str, arguments: str, form: ToolFormName) -> str:
    """A call as the model writes it; `arguments`: JSON."""
    marks = TOOL_FORM_OF[form]
    return f"{marks.open}{NAME_KEY}{json.dumps(name, ensure_ascii=False)}{ARGUMENTS_KEY}{arguments}}}{marks.close}"


def answer_text(content: str, calls: Sequence[tuple[str, str]], form: ToolFormName) -> str:
    """An assistant's message: its text, then its calls (name, arguments)."""
    return content + "\n".join(call_text(name, arguments, form) for name, arguments in calls)


def results_message(results: Sequence[str], form: ToolFormName) -> ChatMessage:
    """The results of the calls before it, in their order."""
    marks = TOOL_FORM_OF[form]
    return ChatMessage("user", "\n".join(f"{marks.result_open}{result}{marks.result_close}" for result in results))


def with_tools(messages: Sequence[ChatMessage], tools: Sequence[Tool], form: ToolFormName) -> list[ChatMessage]:
    """The chat with its tools in the first system message."""
    if not tools:
        return list(messages)
    text = tools_text(tools, form)
    if messages and messages[0].role == "system":
        return [ChatMessage("system", f"{messages[0].content}\n\n{text}"), *messages[1:]]
    return [ChatMessage("system", text), *messages]


def tools_grammar(
    tools: Sequence[Tool],
    *,
    need: Need,
    has_many: bool,
    calls: ToolFormName = "hermes",
    form: Grammar | None = None,
    prefix: str = "",
    param: str = "tools",
) -> Grammar:
    """The answer is calls of these tools, several of them if `has_many`; with `auto` it may be a text instead, in
    `form` if there is one, or have a text before its calls. `calls`: how they are written.
    """
    source = {
        "need": need,
        "has_many": has_many,
        "calls": calls,
        "tools": [[tool.name, dict(tool.parameters)] for tool in tools],
        "params": [tool.param for tool in tools],
        "form": None if form is None else {"kind": form.kind, "source": form.source, "param": form.param},
    }
    return Grammar(kind="tools", source=json.dumps(source, ensure_ascii=False), prefix=prefix, param=param)


def tools_lark(
    names: Sequence[str], *, need: Need, has_many: bool, has_form: bool, calls: ToolFormName = "hermes"
) -> str:
    """The grammar's rules. The arguments of tool i are the rule @arguments_i, a form is @form."""
    marks = TOOL_FORM_OF[calls]
    heads = " | ".join(
        f"{_literal(f'{NAME_KEY}{json.dumps(name, ensure_ascii=False)}{ARGUMENTS_KEY}')} @arguments_{index}"
        for index, name in enumerate(names)
    )
    rules = [f"body: ({heads}) {_literal('}' + marks.close)}", f"call: {_literal(marks.open)} body"]
    more = f" ({_literal(chr(10) + marks.open)} body)*" if has_many else ""
    if need == "required":
        return "\n".join([f"start: call{more}", *rules])
    if has_form:
        return "\n".join([f"start: @form | call{more}", *rules])
    # The first lexeme ends as soon as a call opens, so that no text ever holds that mark
    rules += [f"opened[lazy]: TEXT {_literal(marks.open)}", "TEXT: /(.|\\n)*/"]
    return "\n".join([f"start: TEXT | opened body{more}", *rules])


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
