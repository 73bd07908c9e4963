from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsm_core.engine.output import StopStrings

few_letters = st.text("abé", min_size=1, max_size=6)


def longest_held(stops: list[bytes], seen: bytes) -> int:
    lengths = range(min(len(seen), max(map(len, stops)) - 1), 0, -1)
    return next((n for n in lengths if any(stop.startswith(seen[-n:]) and len(stop) > n for stop in stops)), 0)


@given(st.lists(few_letters, min_size=1, max_size=5), st.text("abéc", max_size=40))
def test_held_and_match_follow_their_definitions(stops: list[str], text: str) -> None:
    finder, node, seen = StopStrings(stops), 0, b""
    encoded = [stop.encode() for stop in stops]
    for byte in text.encode():
        node = finder.advance(node, byte)
        seen += bytes([byte])
        ended = [stop for stop in stops if seen.endswith(stop.encode())]
        assert finder.match(node) == (max(ended, key=lambda stop: len(stop.encode())) if ended else None)
        if ended:
            break  # nothing is asked of a place after the first match
        assert finder.num_held(node) == longest_held(encoded, seen)


def test_without_stop_strings_no_text_is_held() -> None:
    finder = StopStrings(())
    node = 0
    for byte in b"anything":
        node = finder.advance(node, byte)
        assert finder.num_held(node) == 0
        assert finder.match(node) is None


@pytest.mark.parametrize("stop", ["aab", "\n\n", "日本", "🙂"])
def test_a_false_start_does_not_hide_the_true_one(stop: str) -> None:
    finder, node = StopStrings((stop,)), 0
    for byte in (stop[0] + stop).encode():
        node = finder.advance(node, byte)
    assert finder.match(node) == stop
