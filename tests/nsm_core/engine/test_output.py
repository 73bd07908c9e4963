"""Visible output: byte-safe pieces (S1), stop strings (S2), stop ids, end of text."""

from __future__ import annotations

import codecs
import dataclasses
import itertools
import tracemalloc
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from nsm_core.engine.output import OutputStream, StopMatch
from nsm_core.sampling.params import SamplingParams
from nsm_core.tokenizer import Tokenizer
from tests.support.byte_tokens import END_ID, FIRST_PIECE_ID, byte_id, tokenizer_of
from tests.support.counts import scaled
from tests.support.samples import grapheme_strings, multilingual_texts, utf8_byte_cases

BYTES_ONLY = tokenizer_of()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """What came out of one stream: the text after each token fed, and all of it."""

    texts: list[str]
    holding: list[int | None]
    stop: StopMatch | None
    text: str


def run(ids: Sequence[int], *, tokenizer: Tokenizer = BYTES_ONLY, **params: Any) -> Run:
    stream = OutputStream(tokenizer, SamplingParams(**params))
    texts: list[str] = []
    holding: list[int | None] = []
    stop = None
    for token_id in ids:
        step = stream.feed(token_id)
        texts.append(step.text)
        holding.append(step.holding_since)
        if step.stop is not None:
            stop = step.stop
            break
    return Run(texts=texts, holding=holding, stop=stop, text="".join(texts) + stream.finish())


def byte_ids(raw: bytes) -> list[int]:
    return [byte_id(byte) for byte in raw]


def with_pieces(pieces: Sequence[bytes]) -> tuple[Tokenizer, list[int]]:
    """A tokenizer in which each piece is one token, and the ids of the pieces."""
    distinct = list(dict.fromkeys(piece for piece in pieces if len(piece) > 1))
    ids = [byte_id(p[0]) if len(p) == 1 else FIRST_PIECE_ID + distinct.index(p) for p in pieces]
    return tokenizer_of(distinct), ids


def cuts(raw: bytes, num_pieces: int) -> list[list[bytes]]:
    """Every way to cut `raw` into that many pieces."""
    ways = []
    for inner in itertools.combinations(range(1, len(raw)), num_pieces - 1):
        borders = [0, *inner, len(raw)]
        ways.append([raw[a:b] for a, b in itertools.pairwise(borders)])
    return ways


# --- S1: pieces joined are the text ---------------------------------------------------------------------------------


@given(st.binary(max_size=60))
def test_S1_pieces_of_any_bytes_join_to_the_decoded_whole(raw: bytes) -> None:
    assert run(byte_ids(raw)).text == raw.decode("utf-8", "replace") == BYTES_ONLY.decode(byte_ids(raw))


@given(st.lists(st.integers(0, 511), max_size=80))
def test_S1_pieces_of_any_tokens_join_to_the_decoded_whole(tiny_tokenizer: Tokenizer, ids: list[int]) -> None:
    assert run(ids, tokenizer=tiny_tokenizer, ignore_eos=True).text == tiny_tokenizer.decode(ids)


@pytest.mark.parametrize("text", ["🙂", "日本語", "e\u0301", "👩\u200d👩\u200d👧", "ẛ̣", "🇩🇪", "한글"])
def test_S1_a_text_cut_at_any_two_bytes_stays_whole(text: str) -> None:
    raw = text.encode()
    for pieces in [way for num in (1, 2, 3) for way in cuts(raw, num)]:
        tokenizer, ids = with_pieces(pieces)
        got = run(ids, tokenizer=tokenizer)
        assert got.text == text
        assert "\ufffd" not in "".join(got.texts)


def test_S1_tricky_texts_byte_by_byte() -> None:
    texts = ["".join(clusters) for clusters in grapheme_strings()]
    texts += [text[: scaled(300, 100_000)] for text in multilingual_texts().values()]
    for text in texts:
        got = run(byte_ids(text.encode()))
        assert got.text == "".join(got.texts) == text


def test_S1_bad_bytes_in_pieces_decode_like_the_whole() -> None:
    for raw, replaced in utf8_byte_cases():
        assert run(byte_ids(raw)).text == replaced
        for stop in ("\x00\x00", "é", "zzz"):  # held back or not
            assert stop in replaced or run(byte_ids(raw), stop=(stop,)).text == replaced


def test_S1_an_unfinished_character_waits_and_is_given_up_at_the_end() -> None:
    stream = OutputStream(BYTES_ONLY, SamplingParams())
    assert [stream.feed(i).text for i in byte_ids(b"a\xf0\x9f\x99")] == ["a", "", "", ""]
    assert stream.finish() == "\ufffd"
    assert stream.finish() == ""


# --- S2: stop strings -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stop", ["STOP", "\n\n", "été", "日本", "🙂!"])
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 4])
def test_S2_a_stop_string_cut_anywhere_never_shows(stop: str, num_tokens: int) -> None:
    for middle in cuts(stop.encode(), num_tokens):
        pieces = [b"Some text", b" before ", *middle, b"after"]
        tokenizer, ids = with_pieces(pieces)
        got = run(ids, tokenizer=tokenizer, stop=("never", stop))
        assert got.text == "".join(got.texts) == "Some text before "
        assert got.stop == StopMatch(reason=stop, num_dropped=num_tokens)
        assert len(got.texts) == 2 + num_tokens


@pytest.mark.parametrize("stop", ["STOP", "\n\n", "été", "日本", "🙂!"])
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 4])
def test_S2_all_is_released_when_it_does_not_match(stop: str, num_tokens: int) -> None:
    for middle in cuts(stop.encode(), num_tokens):
        pieces = [b"before ", *middle[:-1], b"?", b"after"]
        tokenizer, ids = with_pieces(pieces)
        got = run(ids, tokenizer=tokenizer, stop=(stop,))
        assert got.text == "".join(got.texts) == b"".join(pieces).decode("utf-8", "replace")
        assert got.stop is None
        assert got.holding[-1] is None
        unfinished = run(ids[:-2], tokenizer=tokenizer, stop=(stop,))
        assert unfinished.text == b"".join(pieces[:-2]).decode("utf-8", "replace")
        assert unfinished.texts[0] == "before "
        assert "".join(unfinished.texts[1:]) == ""  # held back to the end


@pytest.mark.parametrize("num_before", range(4))
def test_S2_a_stop_string_that_shares_tokens_with_text(num_before: int) -> None:
    """The token that is cut keeps its visible part as the tail; nothing after the match shows."""
    pieces = [b"one ", b"two STO", b"P three"]
    tokenizer, ids = with_pieces([b"x"] * num_before + pieces)
    got = run(ids, tokenizer=tokenizer, stop=("STOP",))
    assert got.text == "x" * num_before + "one two "
    assert got.stop == StopMatch(reason="STOP", num_dropped=2, tail=b"two ")
    assert got.holding == [None] * (num_before + 1) + [num_before + 2, None]


def test_S2_the_tail_may_begin_inside_a_character() -> None:
    tokenizer, ids = with_pieces([b"a\xf0\x9f", b"\x99\x82.STOP"])
    got = run(ids, tokenizer=tokenizer, stop=("STOP",))
    assert got.text == "a🙂."
    assert got.stop == StopMatch(reason="STOP", num_dropped=1, tail=b"\x99\x82.")


def test_S2_an_unfinished_character_before_a_match_is_shown_as_bad() -> None:
    got = run(byte_ids(b"a\xf0\x9fSTOP"), stop=("STOP",))
    assert got.text == "a\ufffd"
    assert got.stop == StopMatch(reason="STOP", num_dropped=4)


@pytest.mark.parametrize(
    ("stops", "text", "visible", "reason"),
    [
        (("World", "lo"), "Hello World", "Hel", "lo"),
        (("lo W", "World"), "Hello World", "Hel", "lo W"),
        (("ab", "abc"), "xabc", "x", "ab"),
        (("bc", "abc"), "xabc", "x", "abc"),  # both end together: the one that began first
        (("abcd", "bc"), "xabcd", "xa", "bc"),  # "bc" is complete before "abcd" is
        (("aab",), "aaaab", "aa", "aab"),
        (("\n\n",), "a\n \n\nb", "a\n ", "\n\n"),
        (("🙂",), "😀🙂", "😀", "🙂"),
    ],
)
def test_S2_which_match_wins_does_not_depend_on_where_tokens_end(
    stops: tuple[str, ...], text: str, visible: str, reason: str
) -> None:
    raw = text.encode()
    for pieces in [way for num in (1, 2, 3, len(raw)) for way in cuts(raw, num)]:
        tokenizer, ids = with_pieces(pieces)
        got = run(ids, tokenizer=tokenizer, stop=stops)
        assert got.text == visible
        assert got.stop is not None
        assert got.stop.reason == reason


def test_S2_held_text_shrinks_to_the_possible_match() -> None:
    stream = OutputStream(BYTES_ONLY, SamplingParams(stop=("aab",)))
    steps = [stream.feed(token_id) for token_id in byte_ids(b"xaaaac")]
    assert [step.holding_since for step in steps] == [None, 2, 2, 3, 4, None]
    assert [step.text for step in steps] == ["x", "", "", "a", "a", "aac"]


def test_S2_end_of_text_without_text_does_not_break_a_match() -> None:
    ids = [*byte_ids(b"xS"), END_ID, *byte_ids(b"T")]
    got = run(ids, stop=("ST",), ignore_eos=True)
    assert got.text == "x"
    assert got.stop == StopMatch(reason="ST", num_dropped=3)


# --- the slow reference: looks at everything after every token ------------------------------------------------------


def reference(ids: Sequence[int], tokenizer: Tokenizer, params: SamplingParams) -> Run:
    texts: list[str] = []
    holding: list[int | None] = []
    shown = ""
    for n, token_id in enumerate(ids, start=1):
        is_end = token_id == tokenizer.end_of_text_id and not params.ignore_eos
        if token_id in params.stop_token_ids or is_end:
            text = tokenizer.decode(ids[: n - 1])
            reason = token_id if token_id in params.stop_token_ids else None
            stop = StopMatch(reason=reason, num_dropped=1)
            return Run(texts=[*texts, text[len(shown) :]], holding=[*holding, None], stop=stop, text=text)
        found = earliest(tokenizer.decode(ids[:n]), params.stop)
        if found is not None:
            text, matched = found
            stop = cut(ids[:n], tokenizer, tokenizer.decode_bytes(ids[:n]).find(matched.encode()), matched)
            return Run(texts=[*texts, text[len(shown) :]], holding=[*holding, None], stop=stop, text=text)
        raw = tokenizer.decode_bytes(ids[:n])
        num_held = longest_suffix_that_begins_one(raw, params.stop)
        visible = codecs.getincrementaldecoder("utf-8")("replace").decode(raw[: len(raw) - num_held])
        texts.append(visible[len(shown) :])
        holding.append(first_after(ids[:n], tokenizer, len(raw) - num_held) if num_held else None)
        shown = visible
    return Run(texts=texts, holding=holding, stop=None, text=tokenizer.decode(ids))


def earliest(text: str, stops: Sequence[str]) -> tuple[str, str] | None:
    ends = [(text.find(stop) + len(stop), text.find(stop), stop) for stop in stops if stop in text]
    if not ends:
        return None
    _, start, stop = min(ends)
    return text[:start], stop


def longest_suffix_that_begins_one(raw: bytes, stops: Sequence[str]) -> int:
    beginnings = {stop.encode()[:n] for stop in stops for n in range(1, len(stop.encode()))}
    return max((len(beginning) for beginning in beginnings if raw.endswith(beginning)), default=0)


def first_after(ids: Sequence[int], tokenizer: Tokenizer, start: int) -> int:
    """1-based index of the first token with a byte at or after `start`."""
    return next(n for n in range(1, len(ids) + 1) if len(tokenizer.decode_bytes(ids[:n])) > start)


def cut(ids: Sequence[int], tokenizer: Tokenizer, start: int, reason: str) -> StopMatch:
    first = first_after(ids, tokenizer, start)
    tail = tokenizer.decode_bytes(ids)[len(tokenizer.decode_bytes(ids[: first - 1])) : start]
    return StopMatch(reason=reason, num_dropped=len(ids) - first + 1, tail=tail)


PIECES = [piece.encode() for piece in ("ab", "ba", "aab", "bé", "\n\n", "日", "a日本", "🙂b")] + [
    b"a\xf0\x9f",
    b"\x82b",
    b"\xa9\xa9",
]
SMALL = tokenizer_of(PIECES)
some_ids = st.one_of(
    st.sampled_from([byte_id(byte) for byte in b"ab\n"]),
    st.integers(FIRST_PIECE_ID, FIRST_PIECE_ID + len(PIECES) - 1),
    st.sampled_from([byte_id(byte) for byte in "é日本🙂".encode()]),
    st.just(END_ID),
)
some_stops = st.lists(st.text("ab\né日本🙂", min_size=1, max_size=5), max_size=4).map(tuple)


@pytest.mark.parametrize("ignore_eos", [True, False])
@given(
    ids=st.lists(some_ids, max_size=40),
    stop=some_stops,
    stop_token_ids=st.lists(some_ids, max_size=1).map(tuple),
)
@example(ids=[byte_id(0xC3), byte_id(0xA9), byte_id(0xC3)], stop=("é",), stop_token_ids=())
def test_S2_the_stream_equals_the_slow_reference(
    ignore_eos: bool, ids: list[int], stop: tuple[str, ...], stop_token_ids: tuple[int, ...]
) -> None:
    fields: dict[str, Any] = {"stop": stop, "stop_token_ids": stop_token_ids, "ignore_eos": ignore_eos}
    got = run(ids, tokenizer=SMALL, **fields)
    assert got == reference(ids, SMALL, SamplingParams(**fields))
    if got.stop is not None:
        visible_ids = ids[: len(got.texts) - got.stop.num_dropped]
        assert SMALL.decode([*visible_ids, *SMALL.encode_bytes(got.stop.tail)]) == got.text


@given(text=st.text("ab", max_size=60), stop=some_stops, seed=st.randoms(use_true_random=False))
def test_S2_the_same_text_in_other_tokens_ends_alike(text: str, stop: tuple[str, ...], seed: Any) -> None:
    ids = []
    for char in text:
        ids += byte_ids(char.encode()) + [END_ID] * seed.randrange(2)
    whole = run(byte_ids(text.encode()), stop=stop)
    other = run(ids, stop=stop, ignore_eos=True)
    assert other.text == whole.text
    assert (other.stop is None) == (whole.stop is None)


# --- stop ids and end of text ---------------------------------------------------------------------------------------


def test_end_of_text_is_invisible_and_releases_held_text() -> None:
    got = run([*byte_ids(b"abST"), END_ID], stop=("STOP",))
    assert got.text == "abST"
    assert got.texts == ["a", "b", "", "", "ST"]
    assert got.stop == StopMatch(reason=None, num_dropped=1)


def test_a_stop_id_is_not_visible_and_ends_no_stop_string() -> None:
    got = run(byte_ids(b"abP"), stop=("bP",), stop_token_ids=(byte_id(ord("P")),))
    assert got.text == "ab"
    assert got.stop == StopMatch(reason=byte_id(ord("P")), num_dropped=1)


def test_a_stop_releases_an_unfinished_character() -> None:
    assert run([*byte_ids(b"a\xe6\x97"), END_ID]).text == "a\ufffd"


def test_ignored_end_of_text_has_no_text_and_splits_no_character() -> None:
    got = run([END_ID, *byte_ids(b"\xf0\x9f"), END_ID, *byte_ids(b"\x99\x82")], ignore_eos=True)
    assert got.text == "🙂"
    assert got.stop is None


def test_end_of_text_as_a_stop_id_stops_even_when_ignored() -> None:
    got = run([*byte_ids(b"a"), END_ID], stop_token_ids=(END_ID,), ignore_eos=True)
    assert got.stop == StopMatch(reason=END_ID, num_dropped=1)


@pytest.mark.parametrize("ending", ["stop", "end of text", "finish"])
def test_feed_after_the_end_raises(ending: str) -> None:
    stream = OutputStream(BYTES_ONLY, SamplingParams(stop=("S",)))
    if ending == "finish":
        stream.finish()
    else:
        stream.feed(byte_id(ord("S")) if ending == "stop" else END_ID)
    assert stream.finish() == ""
    with pytest.raises(RuntimeError, match="ended"):
        stream.feed(byte_id(ord("a")))


# --- long outputs ---------------------------------------------------------------------------------------------------


def test_memory_does_not_grow_with_the_output() -> None:
    stream = OutputStream(BYTES_ONLY, SamplingParams(stop=("aab", "b" * 50), ignore_eos=True))
    ids = [*byte_ids(b"xaaaa"), END_ID, *byte_ids(b"aac" + b"b" * 40)] * 20

    def held_bytes_after(num_rounds: int) -> int:
        for _ in range(num_rounds):
            for token_id in ids:
                stream.feed(token_id)
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        early = held_bytes_after(2)
        assert held_bytes_after(20) < early + 4096
    finally:
        tracemalloc.stop()
