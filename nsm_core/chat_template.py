"""How a chat becomes plain text. A template's name is part of the model's config, and so of its fingerprint.

What a name renders never changes: a new wording is a new name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from nsm_core.errors import CheckpointError


@dataclasses.dataclass(frozen=True, slots=True)
class ChatMessage:
    """`role`: system, user or assistant."""

    role: str
    content: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ChatTemplate:
    """`render`: messages -> the text that the assistant's answer continues. `stop`: where that answer ends.

    `answer_prefix`: what the model writes first although it is not part of the answer. `jinja`: `render` as programs
    that read a `tokenizer_config.json` know templates.
    """

    name: str
    render: Callable[[Sequence[ChatMessage]], str]
    jinja: str
    stop: tuple[str, ...]
    answer_prefix: str

    def render_next(self, *messages: ChatMessage) -> str:
        """What `messages` add to a chat that ends with an answer: a session reads this, and nothing again."""
        answered = [ChatMessage("user", ""), ChatMessage("assistant", "")]
        return self.render([*answered, *messages]).removeprefix(self.render(answered[:1]) + self.answer_prefix)

    def render_preface(self, content: str) -> str:
        """What a system message adds in front of a chat."""
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
    )
}


def get_template(name: str) -> ChatTemplate:
    """Raises CheckpointError for a name that this version does not know."""
    if name not in TEMPLATES:
        raise CheckpointError(f"unknown chat template {name!r}; known: {', '.join(sorted(TEMPLATES))}")
    return TEMPLATES[name]
