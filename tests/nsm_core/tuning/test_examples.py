from __future__ import annotations

import json
from typing import Any

import pytest

from nsm_core.errors import InvalidRequest
from nsm_core.tokenizer import Tokenizer
from tests.support.tuning import examples_of, file_of

GOOD: dict[str, object] = {"prompt": "One:", "completion": " two"}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def answer(text: str, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **fields}


def test_completion_and_end_of_text_are_targets(tiny_tokenizer: Tokenizer) -> None:
    (example,) = examples_of(file_of(GOOD), tiny_tokenizer)
    prompt, completion = tiny_tokenizer.encode("One:"), tiny_tokenizer.encode(" two")
    assert example.ids == (*prompt, *completion, tiny_tokenizer.end_of_text_id)
    assert example.targets == tuple(range(len(prompt), len(example.ids)))


def test_chat_reads_in_the_templates_words_and_answers_with_weight_count(tiny_tokenizer: Tokenizer) -> None:
    chat = [user("A?"), answer("B", weight=0), user("C?"), answer("D")]
    (example,) = examples_of(file_of({"messages": chat}), tiny_tokenizer)
    text = "User: A?\n\nAssistant: B\n\nUser: C?\n\nAssistant: D"
    assert tiny_tokenizer.decode(example.ids) == text
    counted = [example.ids[index] for index in example.targets]
    assert tiny_tokenizer.decode(counted) == " D"
    assert counted[-1] == tiny_tokenizer.end_of_text_id
    (all_count,) = examples_of(file_of({"messages": [*chat[:1], answer("B"), *chat[2:]]}), tiny_tokenizer)
    assert tiny_tokenizer.decode([all_count.ids[index] for index in all_count.targets]) == " B D"


def test_blank_lines_are_skipped_and_lines_counted(tiny_tokenizer: Tokenizer) -> None:
    raw = b"\n" + file_of(GOOD) + b"\n \n" + file_of(GOOD) + b"\n"
    assert [example.line for example in examples_of(raw, tiny_tokenizer)] == [2, 4]


def test_mark_of_utf8_at_the_start_of_a_file_is_skipped(tiny_tokenizer: Tokenizer) -> None:
    raw = file_of(GOOD)
    assert examples_of(b"\xef\xbb\xbf" + raw, tiny_tokenizer) == examples_of(raw, tiny_tokenizer)


WRONG: list[tuple[bytes, str, str | None]] = [
    (b"{", "it is not JSON", None),
    (b"\xff", "it is not UTF-8: invalid start byte at byte 0", None),
    (b"[" * 100_000, "it is nested too deeply", None),
    (b'{"prompt": NaN, "completion": "a"}', "it is not JSON: NaN is no number", None),
    (b"[1]", "it must be a JSON object, got [1]", None),
    (b'{"text": "a"}', "it must have messages, or prompt and completion; its fields: 'text'", None),
    (b'{"prompt": 3, "completion": "a"}', "prompt must be a string, got 3", "prompt"),
    (b'{"prompt": "", "completion": "a"}', "prompt must have at least 1 character, got none", "prompt"),
    (b'{"prompt": "a", "completion": ""}', "completion must have at least 1 character, got none", "completion"),
    (b'{"prompt": "\\ud800", "completion": "a"}', "text holds an unpaired surrogate at character 0", None),
    (b'{"messages": []}', "messages must be a list with at least 1 message, got []", "messages"),
    (b'{"messages": [3]}', "messages[0] must be an object, got 3", "messages[0]"),
]
WRONG_CHATS: list[tuple[list[Any], str, str]] = [
    ([user("a")], "the last message must be the assistant's, got user", "messages[0].role"),
    ([answer("a", weight=0)], "at least 1 message of the assistant must have a weight above 0", "messages"),
    ([answer("a", weight=0.5)], "messages[0].weight must be 0 or 1, got 0.5", "messages[0].weight"),
    ([answer("a", weight=True)], "messages[0].weight must be 0 or 1, got True", "messages[0].weight"),
    ([{"role": "tool", "content": ""}], "messages[0].role must be one of", "messages[0].role"),
    ([{"role": ["x"], "content": ""}], "messages[0].role must be one of", "messages[0].role"),
    ([user("a"), {"role": "assistant"}], "messages[1].content must be a string, got None", "messages[1].content"),
    ([answer("a", tool_calls=[])], "is not used here", "messages[0].tool_calls"),
]


@pytest.mark.parametrize(
    ("line", "message", "param"),
    [*WRONG, *((json.dumps({"messages": chat}).encode(), *rest) for chat, *rest in WRONG_CHATS)],
)
def test_fault_names_line_and_field(line: bytes, message: str, param: str | None, tiny_tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequest) as caught:
        examples_of(file_of(GOOD) + b"\n" + line, tiny_tokenizer)
    assert str(caught.value).startswith("line 2: ")
    assert message in str(caught.value)
    assert caught.value.param == param
    assert len(str(caught.value)) < 250


def test_limits_are_named(tiny_tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="line 1: it must have at most 5 tokens, it has 11"):
        examples_of(file_of({"prompt": "0123456", "completion": "789"}), tiny_tokenizer, max_tokens=5)
    with pytest.raises(InvalidRequest, match="at most 1 examples"):
        examples_of(file_of(GOOD, GOOD), tiny_tokenizer, max_examples=1)
    with pytest.raises(InvalidRequest, match="at least 1 example, it has none"):
        examples_of(b"\n\n", tiny_tokenizer)
