"""The text that a session reads of chat messages: a chat of its own, or what they add to the text before them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from nsm_core.chat_template import ChatMessage, ChatTemplate
from nsm_core.tokenizer import Tokenizer
from service.state.message_border import find_border
from service.stores.sessions.base import LogPoint, SessionHead, SessionStore


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ChatText:
    """`is_bound`: it is right at that head only, not after another client's turn. `after`: see TurnRequest."""

    text: str
    is_bound: bool = True
    after: LogPoint | None = None


async def text_after(
    store: SessionStore,
    head: SessionHead,
    tokenizer: Tokenizer,
    template: ChatTemplate,
    messages: Sequence[ChatMessage],
) -> ChatText:
    """For a session at `head`. Raises InvalidRequest."""
    if head.num_log_tokens == 0:
        return ChatText(text=template.render(messages))
    text, separator = template.render_next(*messages), template.separator
    if separator and await _has_read(store, head, tokenizer, separator.encode()):
        return ChatText(text=text.removeprefix(separator))
    return ChatText(text=text, is_bound=False)


async def turn_text_after(
    store: SessionStore,
    head: SessionHead,
    tokenizer: Tokenizer,
    template: ChatTemplate,
    messages: Sequence[ChatMessage],
    *,
    answering: ChatTemplate,
) -> ChatText:
    """The same for a turn, which may go on from before the last answer's thought. `answering`: `template`, or it
    without thoughts, for the answer that comes. Raises InvalidRequest.
    """
    end = LogPoint(head.version, head.num_log_tokens)
    border = await find_border(store, head.key, end, tokenizer, template)
    text = None if border is None else border.render_next(answering, messages)
    if border is None or text is None:
        return await text_after(store, head, tokenizer, answering, messages)
    return ChatText(text=text, after=border.point)


async def _has_read(store: SessionStore, head: SessionHead, tokenizer: Tokenizer, end: bytes) -> bool:
    """Whether the session ends with `end` as text that it read: an answer's own last words end no message."""
    marks = await store.log_marks(head.key)
    if not marks or marks[-1].num_sampled > 0:
        return False
    ids = (await store.read_log(head.key, stop=head.num_log_tokens))[-len(end) :]  # a token has at least one byte
    return b"".join(tokenizer.token_bytes(token_id) for token_id in ids).endswith(end)
