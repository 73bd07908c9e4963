"""Files of examples: JSON lines of a prompt with its completion, or of a chat, as token ids.

A line is `{"prompt": …, "completion": …}` or `{"messages": [{"role", "content", "weight"?}, …]}`. What counts is how
likely the model finds the completion, or the assistant's messages; everything else is read alone.
"""

from __future__ import annotations

import codecs
import dataclasses
import json
from collections.abc import Sequence
from typing import Any, NoReturn

from nsm_core.chat_template import ChatMessage, ChatTemplate
from nsm_core.errors import InvalidRequest
from nsm_core.tokenizer import Tokenizer

ROLES = ("system", "user", "assistant")
SHOWN_CHARS = 60


@dataclasses.dataclass(frozen=True, slots=True)
class Example:
    """`line`: in its file, from 1. `ids`: what is read, without a start token. `targets`: the places in `ids` that are
    to become likely, rising; at least one, and none is 0: a token's likelihood comes from the one before it.
    """

    line: int
    ids: tuple[int, ...]
    targets: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ExampleLimits:
    """`max_tokens`: of one example, end of text included. `max_examples`: of one file."""

    max_tokens: int = 1024
    max_examples: int = 10_000


class ExampleReader:
    """Reads the lines of a file for one model."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate, limits: ExampleLimits) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._limits = limits

    def read(self, raw: bytes) -> list[Example]:
        """All examples of a file, in order. Blank lines, and a mark of UTF-8 at its start, are skipped.

        Raises InvalidRequest that names the line and the field of the first fault.
        """
        examples: list[Example] = []
        for number, line in enumerate(raw.removeprefix(codecs.BOM_UTF8).split(b"\n"), start=1):
            if not line.strip():
                continue
            if len(examples) == self._limits.max_examples:
                raise InvalidRequest(f"the file must have at most {self._limits.max_examples} examples, it has more")
            try:
                examples.append(self._read_line(number, line))
            except InvalidRequest as error:
                raise InvalidRequest(f"line {number}: {error}", param=error.param) from error
        if not examples:
            raise InvalidRequest("the file must have at least 1 example, it has none")
        return examples

    def _read_line(self, number: int, line: bytes) -> Example:
        fields = _parse(line)
        if set(fields) == {"prompt", "completion"}:
            segments = self._of_completion(fields)
        elif "messages" in fields:
            segments = self._of_chat(fields)
        else:
            names = ", ".join(sorted(map(_shown, fields))) or "none"
            raise InvalidRequest(f"it must have messages, or prompt and completion; its fields: {names}")
        return self._joined(number, segments)

    def _of_completion(self, fields: dict[str, Any]) -> list[tuple[str, bool]]:
        for name in ("prompt", "completion"):
            if not isinstance(fields[name], str):
                raise InvalidRequest(f"{name} must be a string, got {_shown(fields[name])}", param=name)
            if not fields[name]:
                raise InvalidRequest(f"{name} must have at least 1 character, got none", param=name)
        return [(fields["prompt"], False), (fields["completion"], True)]

    def _of_chat(self, fields: dict[str, Any]) -> list[tuple[str, bool]]:
        """Texts in a row, and whether each is an answer that counts."""
        unknown = set(fields) - {"messages"}
        if unknown:
            name = min(unknown)
            raise InvalidRequest(f"{_shown(name)} is not used here: remove it", param=name)
        messages, counts = _messages(fields["messages"])
        segments: list[tuple[str, bool]] = []
        done = ""
        for index, (message, is_target) in enumerate(zip(messages, counts, strict=True)):
            if message.role != "assistant":
                continue
            before = self._template.render(messages[:index])
            if not before.startswith(done):
                message_text = "the chat template does not render this chat turn by turn"
                raise InvalidRequest(message_text, param=f"messages[{index}]")
            answer = self._template.answer_prefix + message.content
            segments += [(before[len(done) :], False), (answer, is_target)]
            done = before + answer
        return segments

    def _joined(self, number: int, segments: Sequence[tuple[str, bool]]) -> Example:
        """The segments become ids one by one, as a server reads a prompt and then makes an answer; the last answer is
        followed by end of text.
        """
        ids: list[int] = []
        targets: list[int] = []
        for text, is_target in segments:
            start = len(ids)
            ids += self._tokenizer.encode(text)
            if is_target:
                targets += range(start, len(ids))
        ids.append(self._tokenizer.end_of_text_id)
        if segments[-1][1]:
            targets.append(len(ids) - 1)
        if targets[0] == 0:
            raise InvalidRequest("something must be read before the first answer", param="messages")
        if len(ids) > self._limits.max_tokens:
            raise InvalidRequest(f"it must have at most {self._limits.max_tokens} tokens, it has {len(ids)}")
        return Example(number, tuple(ids), tuple(targets))


def _messages(value: object) -> tuple[list[ChatMessage], list[bool]]:
    """The messages, and of each whether it counts."""
    if not isinstance(value, list) or not value:
        raise InvalidRequest(f"messages must be a list with at least 1 message, got {_shown(value)}", param="messages")
    messages, counts = [], []
    for index, given in enumerate(value):
        message, is_target = _message(given, f"messages[{index}]")
        messages.append(message)
        counts.append(is_target)
    if messages[-1].role != "assistant":
        where = f"messages[{len(messages) - 1}].role"
        raise InvalidRequest(f"the last message must be the assistant's, got {messages[-1].role}", param=where)
    if not any(counts):
        raise InvalidRequest("at least 1 message of the assistant must have a weight above 0", param="messages")
    return messages, counts


def _message(given: object, where: str) -> tuple[ChatMessage, bool]:
    if not isinstance(given, dict):
        raise InvalidRequest(f"{where} must be an object, got {_shown(given)}", param=where)
    unknown = set(given) - {"role", "content", "weight"}
    if unknown:
        name = f"{where}.{min(unknown)}"
        raise InvalidRequest(f"{_shown(name)} is not used here: a message has role, content and weight", param=name)
    role, content, weight = given.get("role"), given.get("content"), given.get("weight", 1)
    if role not in ROLES:
        names = ", ".join(ROLES)
        raise InvalidRequest(f"{where}.role must be one of {names}, got {_shown(role)}", param=f"{where}.role")
    if not isinstance(content, str):
        raise InvalidRequest(f"{where}.content must be a string, got {_shown(content)}", param=f"{where}.content")
    if weight not in (0, 1) or isinstance(weight, bool | float):
        raise InvalidRequest(f"{where}.weight must be 0 or 1, got {_shown(weight)}", param=f"{where}.weight")
    return ChatMessage(role, content), role == "assistant" and weight == 1


def _parse(line: bytes) -> dict[str, Any]:
    try:
        value = json.loads(line.decode("utf-8"), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"it is not UTF-8: {error.reason} at byte {error.start}") from error
    except RecursionError as error:
        raise InvalidRequest("it is nested too deeply") from error
    except ValueError as error:
        raise InvalidRequest(f"it is not JSON: {str(error)[:SHOWN_CHARS]}") from error
    if not isinstance(value, dict):
        raise InvalidRequest(f"it must be a JSON object, got {_shown(value)}")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}…"
