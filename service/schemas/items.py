"""Message items as the Responses API shows and the record store keeps them: plain JSON objects."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from nsm_core.chat_template import ChatMessage
from nsm_core.grammars.tool_calls import answer_text, results_message
from nsm_core.tool_form import ToolFormName

Item = dict[str, Any]


def new_item_id() -> str:
    return f"msg_{uuid.uuid4().hex}"


def input_item(role: str, texts: Sequence[str]) -> Item:
    """A message that a client brought, under an id of its own."""
    content = [output_text(text) if role == "assistant" else {"type": "input_text", "text": text} for text in texts]
    return {"id": new_item_id(), "type": "message", "role": role, "status": "completed", "content": content}


def output_item(item_id: str, text: str | None, *, status: str) -> Item:
    """The answer's message; `text` is None for one that has only begun."""
    content = [] if text is None else [output_text(text)]
    return {"id": item_id, "type": "message", "role": "assistant", "status": status, "content": content}


def output_text(text: str) -> Item:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def call_item(call_id: str, name: str, arguments: str) -> Item:
    """A call of an earlier answer that a client brought, under an id of its own."""
    return {
        "id": f"fc_{uuid.uuid4().hex}",
        "type": "function_call",
        "call_id": call_id,
        "name": name,
        "arguments": arguments,
        "status": "completed",
    }


def result_item(call_id: str, output: str) -> Item:
    """A call's result."""
    return {
        "id": f"fco_{uuid.uuid4().hex}",
        "type": "function_call_output",
        "call_id": call_id,
        "output": output,
        "status": "completed",
    }


def messages_of(items: Sequence[Mapping[str, Any]], form: ToolFormName) -> list[ChatMessage]:
    """The items as the model reads them: a developer's message is a system message by its older name, calls that
    follow an answer's text or each other are one answer, and so are results one message. Thoughts are not read again.
    """
    items = [item for item in items if item["type"] != "reasoning"]
    messages: list[ChatMessage] = []
    for kind, group in itertools.groupby(items, key=_group_of):
        if kind == "results":
            messages.append(results_message([item["output"] for item in group], form))
        elif kind == "answer":
            messages += _answers_of(list(group), form)
        else:
            for item in group:
                role = "system" if item["role"] == "developer" else item["role"]
                messages.append(ChatMessage(role=role, content=_text_of(item)))
    return messages


def _group_of(item: Mapping[str, Any]) -> str:
    if item["type"] == "function_call_output":
        return "results"
    return "answer" if item["type"] == "function_call" or item["role"] == "assistant" else "message"


def _answers_of(items: Sequence[Mapping[str, Any]], form: ToolFormName) -> list[ChatMessage]:
    """Assistant's messages, each with the calls behind it."""
    answers: list[tuple[str, list[tuple[str, str]]]] = []
    for item in items:
        if item["type"] == "message":
            answers.append((_text_of(item), []))
        else:
            if not answers:
                answers.append(("", []))
            answers[-1][1].append((item["name"], item["arguments"]))
    return [ChatMessage("assistant", answer_text(text, calls, form)) for text, calls in answers]


def _text_of(item: Mapping[str, Any]) -> str:
    return "\n".join(part["text"] for part in item["content"])


def list_object(items: Sequence[Item], *, has_more: bool) -> dict[str, Any]:
    """A page of items; the ids of an empty one are empty."""
    first_id, last_id = (items[0]["id"], items[-1]["id"]) if items else ("", "")
    return {"object": "list", "data": list(items), "first_id": first_id, "last_id": last_id, "has_more": has_more}


def page_of(ids: Sequence[str], *, limit: int, order: str, after: str | None) -> tuple[list[str], bool] | None:
    """The ids of a page, and whether there are more; None for an `after` that is none of `ids`, which are the oldest
    first.
    """
    ordered = list(ids) if order == "asc" else list(reversed(ids))
    if after is not None and after not in ordered:
        return None
    start = 0 if after is None else ordered.index(after) + 1
    return ordered[start : start + limit], len(ordered) > start + limit
