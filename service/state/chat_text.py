"""The text that a session reads of chat messages: a chat of its own, or what they add to the text before them."""

from __future__ import annotations

from collections.abc import Sequence

from nsm_core.chat_template import ChatMessage, ChatTemplate
from nsm_core.tokenizer import Tokenizer
from service.stores.sessions.base import SessionHead, SessionStore


async def text_after(
    store: SessionStore,
    head: SessionHead,
    tokenizer: Tokenizer,
    template: ChatTemplate,
    messages: Sequence[ChatMessage],
) -> tuple[str, bool]:
    """The text, and whether it is right at `head` only: not after another client's turn. Raises InvalidRequest."""
    if head.num_log_tokens == 0:
        return template.render(messages), True
    text, separator = template.render_next(*messages), template.separator
    if separator and await _has_read(store, head, tokenizer, separator.encode()):
        return text.removeprefix(separator), True
    return text, False


async def _has_read(store: SessionStore, head: SessionHead, tokenizer: Tokenizer, end: bytes) -> bool:
    """Whether the session ends with `end` as text that it read: an answer's own last words end no message."""
    marks = await store.log_marks(head.key)
    if not marks or marks[-1].num_sampled > 0:
        return False
    ids = (await store.read_log(head.key, stop=head.num_log_tokens))[-len(end) :]  # a token has at least one byte
    return b"".join(tokenizer.token_bytes(token_id) for token_id in ids).endswith(end)
