"""RWKV's text form of a chat: `User: ...`, a blank line, `Assistant:`. Questions have no blank lines inside.

With thinking, the answer begins inside of `<think>`; without, an empty thought stands before it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

STOP = ("\n\nUser:", "\n\nSystem:")
NAMES = {"system": "System: ", "user": "User: ", "assistant": "Assistant: "}
NO_THOUGHT = "<think>\n</think"
THINK = "<think"
_BLANK_LINES = re.compile(r"\n{2,}")
# Jinja has no expressions for patterns: each round halves the longest run of line ends
_ROUNDS = 32


def render(messages: Sequence[tuple[str, str]], opening: str) -> str:
    """Roles and contents -> the text that an answer continues. `opening`: "", THINK or NO_THOUGHT."""
    paragraphs = [NAMES[role] + _content(role, content, opening) for role, content in messages]
    return "\n\n".join([*paragraphs, f"Assistant: {opening}" if opening else "Assistant:"])


def _content(role: str, content: str, opening: str) -> str:
    if role != "assistant":
        return _BLANK_LINES.sub("\n", content.replace("\r\n", "\n").strip())
    is_thought = opening == NO_THOUGHT or (opening == THINK and "</think>" in content)
    return f"{opening}>{content}" if is_thought else content


def jinja(opening: str) -> str:
    """`render` as programs that read a `tokenizer_config.json` know templates."""
    quoted = opening.replace("\n", "\\n")
    thought = {
        "": "",
        THINK: f"{{{{ '{quoted}>' if '</think>' in message['content'] else '' }}}}",
        NO_THOUGHT: f"{{{{ '{quoted}>' }}}}",
    }[opening]
    end = f"Assistant: {quoted}" if opening else "Assistant:"
    return (
        "{% for message in messages %}"
        "{{ {'system': 'System: ', 'user': 'User: ', 'assistant': 'Assistant: '}[message['role']] }}"
        "{% if message['role'] == 'assistant' %}"
        f"{thought}{{{{ message['content'] }}}}"
        "{% else %}"
        "{% set closed = namespace(text=message['content'].replace('\\r\\n', '\\n').strip()) %}"
        f"{{% for _ in range({_ROUNDS}) %}}{{% set closed.text = closed.text.replace('\\n\\n', '\\n') %}}{{% endfor %}}"
        "{{ closed.text }}"
        "{% endif %}"
        "{{ '\\n\\n' }}"
        "{% endfor %}"
        f"{{% if add_generation_prompt %}}{{{{ '{end}' }}}}{{% endif %}}"
    )
