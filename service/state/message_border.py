"""Where a chat that forgets thoughts goes on: before the answer that began with one. It is read again without it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from nsm_core.chat_template import ChatMessage, ChatTemplate
from nsm_core.thoughts import ThoughtReader, begins_with_thought
from nsm_core.tokenizer import Tokenizer
from service.stores.sessions.base import LogPoint, SessionStore
from service.stores.sessions.key import SessionKey


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MessageBorder:
    """`point`: what the session had read before the answer's thought. `text`: what it read of the message after that,
    which stays. `answer`: less the thought.
    """

    point: LogPoint
    text: str
    answer: str

    def render_next(self, template: ChatTemplate, messages: Sequence[ChatMessage]) -> str | None:
        """What a turn reads from `point` on; None where the template needs the thought."""
        rest = template.render_after_thought(self.answer, *messages)
        return None if rest is None else self.text + rest


def num_opening(tokenizer: Tokenizer, template: ChatTemplate, ids: Sequence[int]) -> int:
    """How many ids at the end of a prompt hold what no later prompt of the chat has there."""
    opening = template.opening
    sizes = range(len(opening) + 1)  # a token has a character or more, but for the end of another one
    return next((size for size in sizes if tokenizer.decode(ids[len(ids) - size :]).endswith(opening)), 0)


def opening_of_turn(tokenizer: Tokenizer, template: ChatTemplate, ids: Sequence[int]) -> int | None:
    """`TurnRequest.num_opening` of a turn that reads `ids`. `template`: that of the answer."""
    return None if template.reasoning == "none" else num_opening(tokenizer, template, ids)


async def find_border(
    store: SessionStore, key: SessionKey, end: LogPoint, tokenizer: Tokenizer, template: ChatTemplate
) -> MessageBorder | None:
    """Of the answer that the log has at `end`; None if it ends with none, or with one that had no thought."""
    if template.reasoning == "none":
        return None
    marks = [mark for mark in await store.log_marks(key) if mark.version <= end.version]
    if len(marks) < 2 or marks[-2].num_sampled or not marks[-1].num_sampled:
        return None
    before, newest = marks[-2:]
    if LogPoint(newest.version, newest.num_log_tokens) != end:
        return None
    ids = (await store.read_log(key, stop=end.num_log_tokens))[before.num_log_tokens :]
    num_read = len(ids) - newest.num_sampled
    read, sampled = tokenizer.decode(ids[:num_read]), tokenizer.decode(ids[num_read:])
    if not read.endswith(template.opening):
        return None
    reader = ThoughtReader(is_open=template.reasoning == "open")
    if template.reasoning == "own" and not begins_with_thought(sampled):
        return None
    parts = [*reader.feed(sampled.removeprefix(template.answer_prefix)), *reader.finish()]
    return MessageBorder(
        point=LogPoint(before.version, before.num_log_tokens),
        text=read.removesuffix(template.opening) if template.opening else read,
        answer="".join(part.text for part in parts if not part.is_thought),
    )
