"""How a chat becomes plain text: by a template that has a name here, or by Jinja that comes with a model's files.

What a name renders never changes: a new wording is a new name. The name of an NSM model's template is part of its
config, and so of its fingerprint.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

from nsm_core import rwkv_text
from nsm_core.errors import CheckpointError, InvalidRequest, reason_of
from nsm_core.tool_form import ToolFormName

_ANSWER, _QUESTION = "an-answer-3141", "a-question-2718"  # stand for texts, to see what a template puts around them
Reasoning = Literal["none", "own", "open"]
_THOUGHT, _END_OF_THOUGHT = "<think>", "</think>"
_TAG = re.compile(r"<[^<>\s]{1,60}>")


@dataclasses.dataclass(frozen=True, slots=True)
class ChatMessage:
    """`role`: system, user or assistant."""

    role: str
    content: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ChatTemplate:
    """`render`: messages -> the text that the assistant's answer continues. `stop`: where that answer ends.

    `answer_prefix`: the character that the model writes first although it is not part of the answer, if there is one.
    `jinja`: `render` as programs that read a `tokenizer_config.json` know templates. `has_own_system_message`: a system
    message stands in place of one that the template has itself, so that none can be put in front of a chat.
    `reasoning`: whether an answer begins inside a thought ("open"), may begin with one of its own ("own"), or has none.
    `thought_end`: text that closes the thought which a prompt opens, for an answer without a thought.
    `tool_form`: how calls of tools are written.
    """

    name: str
    render: Callable[[Sequence[ChatMessage]], str]
    jinja: str
    stop: tuple[str, ...]
    answer_prefix: str
    has_own_system_message: bool = False
    reasoning: Reasoning = "none"
    thought_end: str = ""
    tool_form: ToolFormName = "hermes"

    def render_next(self, *messages: ChatMessage) -> str:
        """What `messages` add to a chat that ends with an answer: a session reads this, and nothing again."""
        answered = [ChatMessage("user", _QUESTION), ChatMessage("assistant", _ANSWER)]
        return self.render([*answered, *messages]).partition(_ANSWER)[2]

    def render_after_thought(self, answer: str, *messages: ChatMessage) -> str | None:
        """What follows on a prompt, less its `opening`, where its answer's thought is forgotten: `answer` without it,
        and `messages`. None where the template puts something else in the place of that prompt.
        """
        question = ChatMessage("user", _QUESTION)
        begun = self.render([question]).removesuffix(self.opening)
        later = self.render([question, ChatMessage("assistant", answer), *messages])
        return later.removeprefix(begun) if later.startswith(begun) else None

    @property
    def separator(self) -> str:
        """What stands between a chat's message and the next one; "" where a chat's first message looks different."""
        message = ChatMessage("user", _QUESTION)
        later, first = self.render_next(message), self.render([message])
        return later.removesuffix(first) if later.endswith(first) else ""

    @property
    def opening(self) -> str:
        """What a prompt ends with that no later prompt of the chat has there: the beginning of a thought, and the white
        space before it, which tokens may join to an answer's first word.
        """
        user, answer = ChatMessage("user", _QUESTION), ChatMessage("assistant", _ANSWER)
        begun, later = self.render([user]), self.render([user, answer, user])
        if later.startswith(begun):
            return ""
        pairs = enumerate(zip(begun, later, strict=False))
        same = next((at for at, (one, other) in pairs if one != other), len(later))
        return begun[len(begun[:same].rstrip()) :]

    def without_thought(self) -> ChatTemplate:
        """For an answer that must have a form from its first character: a thought that the template opens is closed."""
        return dataclasses.replace(
            self,
            render=lambda messages: self.render(messages) + self.thought_end,
            reasoning="none",
            thought_end="",
        )

    def render_preface(self, content: str) -> str:
        """What a system message adds in front of a chat. Raises InvalidRequest where nothing can be put there."""
        if self.has_own_system_message:
            raise InvalidRequest(
                "instructions cannot stand before a chat with this model's template: send a system message in input",
                param="instructions",
            )
        rest = [ChatMessage("user", "")]
        return self.render([ChatMessage("system", content), *rest]).removesuffix(self.render(rest))


def _render_plain_v1(messages: Sequence[ChatMessage]) -> str:
    """Paragraphs, as in a play: a model trained on books continues with the next speaker's words."""
    speakers = {"system": "", "user": "User: ", "assistant": "Assistant: "}
    paragraphs = [speakers[message.role] + message.content for message in messages]
    return "\n\n".join([*paragraphs, "Assistant:"])


PLAIN_V1_JINJA = (
    "{% for message in messages %}"
    "{{ {'system': '', 'user': 'User: ', 'assistant': 'Assistant: '}[message['role']] + message['content'] }}"
    "{{ '\\n\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)


def _rwkv(name: str, opening: str, answer_prefix: str, reasoning: Reasoning) -> ChatTemplate:
    is_open = reasoning == "open"
    return ChatTemplate(
        name=name,
        render=lambda messages: rwkv_text.render([(message.role, message.content) for message in messages], opening),
        jinja=rwkv_text.jinja(opening),
        stop=rwkv_text.STOP,
        answer_prefix=answer_prefix,
        reasoning=reasoning,
        thought_end=rwkv_text.NO_THOUGHT.removeprefix(opening) if is_open else "",
        tool_form="rwkv",
    )


RWKV = "rwkv-v1"
TEMPLATES: Mapping[str, ChatTemplate] = {
    template.name: template
    for template in (
        ChatTemplate(
            name="plain-v1",
            render=_render_plain_v1,
            jinja=PLAIN_V1_JINJA,
            stop=("\n\nUser:", "\nUser:"),
            answer_prefix=" ",
        ),
        _rwkv(RWKV, "", " ", "own"),
        _rwkv("rwkv-think-v1", rwkv_text.THINK, ">", "open"),
        _rwkv("rwkv-no-think-v1", rwkv_text.NO_THOUGHT, ">", "none"),
    )
}


def get_template(template: str) -> ChatTemplate:
    """The template of a name, or one in Jinja. Raises CheckpointError for any other text."""
    if template in TEMPLATES:
        return TEMPLATES[template]
    if "{%" not in template and "{{" not in template:
        raise CheckpointError(f"unknown chat template {template[:80]!r}; known: {', '.join(sorted(TEMPLATES))}")
    return _compiled(template)


def read_template(given: str) -> str:
    """A template's name as it is, or the text of a file of Jinja, for `get_template`. Raises CheckpointError."""
    try:
        text = Path(given).read_text("utf-8") if Path(given).is_file() else given
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"cannot read the chat template {given[:80]!r}: {reason_of(error)}") from error
    get_template(text)
    return text


@functools.lru_cache(maxsize=16)
def _compiled(source: str) -> ChatTemplate:
    """Tries the template on small chats: a session reads what each turn adds, so that must not depend on the rest."""
    from nsm_core.jinja_template import JinjaTemplate  # models of this project need no Jinja

    compiled = JinjaTemplate(source)

    def render(messages: Sequence[ChatMessage], **variables: bool) -> str:
        return compiled.render([dataclasses.asdict(message) for message in messages], **variables)

    user, answer = ChatMessage("user", _QUESTION), ChatMessage("assistant", _ANSWER)
    system = ChatMessage("system", "a-rule-1618")
    next_user = ChatMessage("user", "another-question")
    try:
        begun = render([user])
        added = [render([*chat, answer, next_user]).rpartition(_ANSWER)[2] for chat in ([user], [user, answer, user])]
        history = render([user, answer, next_user])
        unthinking = render([user], enable_thinking=False)
    except InvalidRequest as error:
        raise CheckpointError(f"the chat template cannot render a chat: {error}") from error
    between, is_asked, _ = added[0].partition(next_user.content)
    if _QUESTION not in begun or _ANSWER not in history or not is_asked or added[0] != added[1]:
        raise CheckpointError("the chat template cannot render a chat turn by turn: a turn depends on earlier ones")
    reasoning = _reasoning_of(source, begun)
    return ChatTemplate(
        name="jinja",
        render=render,
        jinja=source,
        stop=_stop_of(between),
        answer_prefix=_prefix_of(history, begun),
        has_own_system_message=not _is_put_in_front(render, system, user),
        reasoning=reasoning,
        thought_end=_end_of_thought(begun, unthinking) if reasoning == "open" else "",
    )


def _stop_of(between: str) -> tuple[str, ...]:
    """Where an answer ends, by what stands between it and the next question: a tag, or the question's beginning."""
    tag = _TAG.match(between.lstrip())
    text = tag[0] if tag is not None else between.rstrip()
    return (text,) if text.strip() else ()


def _reasoning_of(source: str, begun: str) -> Reasoning:
    """`begun`: what an answer continues."""
    if begun.rstrip().endswith(_THOUGHT):
        return "open"
    is_closed = begun.rstrip().endswith(_END_OF_THOUGHT)
    return "own" if _END_OF_THOUGHT in source and not is_closed else "none"


def _end_of_thought(begun: str, unthinking: str) -> str:
    """What closes the thought that `begun` opens. `unthinking`: the template's own form of a prompt without one, if it
    has a form of its own.
    """
    rest = unthinking.removeprefix(begun)
    if unthinking.startswith(begun) and rest.strip() == _END_OF_THOUGHT:
        return rest
    return "\n" * (2 - begun.endswith("\n")) + _END_OF_THOUGHT + "\n\n"


def _prefix_of(history: str, begun: str) -> str:
    """What a chat that goes on has between the beginning of an answer and the answer, if that is one character."""
    prefix = history.removeprefix(begun).partition(_ANSWER)[0] if history.startswith(begun) else ""
    return prefix if len(prefix) == 1 else ""


def _is_put_in_front(render: Callable[[Sequence[ChatMessage]], str], system: ChatMessage, user: ChatMessage) -> bool:
    try:
        return render([system, user]).endswith(render([user]))
    except InvalidRequest:  # a template without system messages
        return False
