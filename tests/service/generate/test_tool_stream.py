"""Calls out of text: every cut of an answer gives the same text and calls."""

from __future__ import annotations

import random

import pytest

from nsm_core.grammars.tool_calls import answer_text, call_text
from nsm_core.tool_form import ToolFormName
from service.generate.tool_stream import ArgumentsPiece, CallBegun, CallEnded, Piece, TextPiece, ToolCallReader
from tests.support.counts import scaled

TRICKY = '{"a": "}</tool_call>```\\"{", "b": [{"c": "\\\\"}]}'
ANSWERS = {
    "text": ("It is <b>late</b>, 1 < 2.", []),
    "call": ("", [("now", "{}")]),
    "text and calls": ("Let me see.\n", [("weather.v2", TRICKY), ("now", "{}"), ("now", '{"x": {}}')]),
    "a text that ends like a mark": ("so <tool_c", []),
    "a text with code": ("Write ```js and ``", []),
    "a text in a form": ('{"name": "now"}', []),
}


def read(
    pieces: list[str], *, form: ToolFormName = "hermes", is_either: bool = False
) -> tuple[str, list[tuple[str, str]], int]:
    """The text, the calls, and how many of these ended."""
    reader, found = ToolCallReader(form=form, is_either=is_either), list[Piece]()
    for piece in pieces:
        found += reader.feed(piece)
    found += reader.finish()
    text, calls, num_ended = "", list[tuple[str, str]](), 0
    for one in found:
        if isinstance(one, TextPiece):
            text += one.text
        elif isinstance(one, CallBegun):
            assert one.index == len(calls)
            calls.append((one.name, ""))
        elif isinstance(one, ArgumentsPiece):
            assert one.text
            calls[one.index] = (calls[one.index][0], calls[one.index][1] + one.text)
        else:
            assert isinstance(one, CallEnded)
            num_ended += 1
    return text, calls, num_ended


@pytest.mark.parametrize("form", ["hermes", "rwkv"])
@pytest.mark.parametrize("name", ANSWERS)
def test_any_cuts_give_the_text_and_the_calls(name: str, form: ToolFormName) -> None:
    content, calls = ANSWERS[name]
    whole, chance = answer_text(content, calls, form), random.Random(3)
    for _ in range(scaled(30, 3000)):
        cuts = sorted(chance.randrange(len(whole) + 1) for _ in range(chance.randrange(12)))
        pieces = [whole[start:end] for start, end in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
        assert read(pieces, form=form) == (content, calls, len(calls))
    assert read(list(whole), form=form) == (content, calls, len(calls))


def test_a_call_that_was_cut_has_begun_and_not_ended() -> None:
    whole = call_text("weather", '{"town": "Ur"}', "hermes")
    assert read([whole[:-12]]) == ("", [("weather", '{"town": "Ur"}')], 0)
    assert read([whole[:30]]) == ("", [], 0)


def test_a_text_in_a_form_of_its_own_may_hold_the_mark() -> None:
    text = '{"a": "<tool_call>"}'
    assert read(list(text), is_either=True) == (text, [], 0)
    assert read(["<tool", '_form"]'], is_either=True) == ('<tool_form"]', [], 0)
    assert read(list(call_text("now", "{}", "hermes")), is_either=True) == ("", [("now", "{}")], 1)
