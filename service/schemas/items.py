"""Message items as the Responses API shows and the record store keeps them: plain JSON objects."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from nsm_core.chat_template import ChatMessage

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


def message_of(item: Mapping[str, Any]) -> ChatMessage:
    """The item as the model reads it; a developer's message is a system message by its older name."""
    role = "system" if item["role"] == "developer" else item["role"]
    return ChatMessage(role=role, content="\n".join(part["text"] for part in item["content"]))


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
