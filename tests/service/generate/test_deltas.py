from __future__ import annotations

import codecs
import itertools
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsm_core.engine.output import OutputStream
from nsm_core.engine.request import Event, Finished, FinishReason, PromptScored, TokenEvent, TokenLogprob
from nsm_core.sampling.params import SamplingParams
from nsm_core.tokenizer import END_OF_TEXT
from service.generate.chat import PrefixCutter
from service.generate.completions import ChoiceText
from service.generate.deltas import Delta, DeltaBuilder
from service.generate.openai_format import chat_logprobs
from tests.support.fakes import tiny_tokenizer

A, B, C, SPACE = (tiny_tokenizer().encode(char)[0] for char in "abc ")
WAS = tiny_tokenizer().encode(" was")[0]
HALF, OTHER_HALF = tiny_tokenizer().encode("é")
END = tiny_tokenizer().end_of_text_id


def token(token_id: int, text: str, *, has_logprob: bool = True) -> TokenEvent:
    logprob = TokenLogprob(token_id=token_id, logprob=-1.0, top=((token_id, -1.0), (A, -2.0))) if has_logprob else None
    return TokenEvent(index=1, token_id=token_id, text=text, logprob=logprob)


def finished(
    text: str = "", *, dropped: int = 0, tail: bytes = b"", reason: FinishReason = FinishReason.STOP
) -> Finished:
    return Finished(reason=reason, text=text, num_dropped_tokens=dropped, tail=tail)


def feed_all(events: Sequence[Event]) -> list[Delta]:
    view = DeltaBuilder(tiny_tokenizer())
    return [delta for event in events for delta in view.feed(event)]


def shown(deltas: Sequence[Delta]) -> list[tuple[str, list[int]]]:
    return [(delta.text, [scored.token_id for scored in delta.tokens]) for delta in deltas]


def test_logprobs_of_held_back_tokens_join_the_next_piece() -> None:
    deltas = feed_all([token(A, "a"), token(B, ""), token(C, "bc"), finished()])
    assert shown(deltas) == [("a", [A]), ("bc", [B, C]), ("", [])]


def test_a_character_in_two_tokens_is_one_piece() -> None:
    deltas = feed_all([token(HALF, ""), token(OTHER_HALF, "é"), finished()])
    assert shown(deltas) == [("é", [HALF, OTHER_HALF]), ("", [])]


def test_S2_tokens_of_a_stop_string_never_appear() -> None:
    deltas = feed_all([token(A, "a"), token(B, ""), token(C, ""), finished(dropped=2)])
    assert shown(deltas) == [("a", [A]), ("", [])]


def test_S2_a_token_that_is_visible_in_part_waits_for_the_rest() -> None:
    # "s" may begin the stop string "sb": it is held back, and either comes with what follows or never
    assert shown(feed_all([token(WAS, " wa"), token(A, "sa"), finished()])) == [(" wa", []), ("sa", [WAS, A]), ("", [])]
    assert shown(feed_all([token(WAS, " wa"), token(B, ""), finished(dropped=2)])) == [(" wa", []), ("", [])]


def test_S2_what_was_held_back_in_vain_is_released_at_the_end() -> None:
    deltas = feed_all([token(A, ""), token(B, ""), finished("ab", reason=FinishReason.LENGTH)])
    assert shown(deltas) == [("ab", [A, B]), ("", [])]


def test_X10_a_token_that_a_stop_string_cuts_keeps_the_bytes_before_it() -> None:
    deltas = feed_all([token(A, "a"), token(WAS, ""), finished(" w", dropped=1, tail=b" w")])
    assert shown(deltas) == [("a", [A]), (" w", [WAS]), ("", [])]
    assert [scored.raw for delta in deltas for scored in delta.tokens] == [b"a", b" w"]


@pytest.mark.parametrize("reason", [FinishReason.LENGTH, FinishReason.STOP])
def test_end_of_text_is_shown_only_where_it_does_not_end_the_text(reason: FinishReason) -> None:
    dropped = 1 if reason is FinishReason.STOP else 0
    deltas = feed_all([token(A, "a"), token(END, ""), finished(reason=reason, dropped=dropped)])
    assert shown(deltas) == ([("a", [A]), ("", [])] if dropped else [("a", [A]), ("", [END]), ("", [])])


def test_S4_the_last_delta_is_empty_and_carries_the_end() -> None:
    end = finished("b", reason=FinishReason.LENGTH)
    last = feed_all([token(A, "a"), end])[-1]
    assert (last.text, last.tokens, last.finished) == ("", (), end)


def test_a_scored_prompt_is_a_delta_of_its_own() -> None:
    scores = (None, TokenLogprob(token_id=5, logprob=-0.5))
    assert feed_all([PromptScored(logprobs=scores)]) == [Delta(prompt=scores)]


def test_without_logprobs_there_are_only_pieces_of_text() -> None:
    deltas = feed_all([token(A, "", has_logprob=False), token(B, "ab", has_logprob=False), finished()])
    assert shown(deltas) == [("ab", []), ("", [])]


def engine_events(ids: Sequence[int], stop: tuple[str, ...]) -> Iterator[Event]:
    """What the engine makes of sampled ids: its own output stream, its own rule of what comes with which event."""
    output = OutputStream(tiny_tokenizer(), SamplingParams(stop=stop))
    for token_id in ids:
        step = output.feed(token_id)
        yield token(token_id, step.text if step.stop is None else "")
        if step.stop is not None:
            yield finished(step.text, dropped=step.stop.num_dropped, tail=step.stop.tail)
            return
    yield finished(output.finish(), reason=FinishReason.LENGTH)


some_ids = st.lists(st.sampled_from([A, B, C, SPACE, WAS, HALF, OTHER_HALF, END]), max_size=16)
some_stops = st.lists(st.text("abc wasé", min_size=1, max_size=4), max_size=3)


@given(some_ids, some_stops)
def test_S2_every_kept_token_appears_once_in_order_and_never_before_its_text(ids: list[int], stop: list[str]) -> None:
    events = list(engine_events(ids, tuple(stop)))
    end = events[-1]
    assert isinstance(end, Finished)
    sampled = [event.token_id for event in events if isinstance(event, TokenEvent)]
    visible_ids = sampled[: len(sampled) - end.num_dropped_tokens]
    deltas = feed_all(events)
    cut = sampled[len(visible_ids) :][:1] if end.tail else []
    assert [scored.token_id for delta in deltas for scored in delta.tokens] == [*visible_ids, *cut]
    text, raw = "", b""
    for delta in deltas:
        text += delta.text
        raw += b"".join(scored.raw for scored in delta.tokens)
        assert text.startswith(raw.decode(errors="replace").removesuffix("\ufffd"))
    assert not any(text.endswith(word) for word in stop)


@given(some_ids, some_stops)
def test_X10_the_log_probabilities_of_completions_join_to_the_text(ids: list[int], stop: list[str]) -> None:
    choice = ChoiceText(tiny_tokenizer(), has_logprobs=True)
    pieces = [piece for delta in feed_all(list(engine_events(ids, tuple(stop)))) for piece in choice.pieces(delta)]
    whole = choice.join(pieces)
    text, logprobs = whole["text"], whole["logprobs"]
    assert text == "".join(piece["text"] for piece in pieces)
    raw = b"".join(map(bytes_of, logprobs["tokens"]))
    assert raw.decode(errors="replace") == text
    assert all(name in top for name, top in zip(logprobs["tokens"], logprobs["top_logprobs"], strict=True))
    starts = itertools.accumulate((bytes_of(name) for name in logprobs["tokens"]), initial=b"")
    utf8 = codecs.getincrementaldecoder("utf-8")
    assert logprobs["text_offset"] == [len(utf8("replace").decode(start)) for start in starts][:-1]


@given(some_ids, some_stops, st.sampled_from(["", " "]))
def test_X10_the_log_probabilities_of_chats_join_to_the_text(ids: list[int], stop: list[str], prefix: str) -> None:
    cutter, text, content = PrefixCutter(prefix), "", []
    for delta in feed_all(list(engine_events(ids, tuple(stop)))):
        text += cutter.cut(delta)
        content += chat_logprobs(tiny_tokenizer(), cutter.cut_tokens(delta))["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in content).decode(errors="replace") == text
    for entry in content:
        assert bytes_of(entry["token"]) == bytes(entry["bytes"])
        assert {**entry, "top_logprobs": None} in [{**top, "top_logprobs": None} for top in entry["top_logprobs"]]


def bytes_of(name: str) -> bytes:
    """Of a token as it is shown."""
    if name == END_OF_TEXT:
        return b""
    marked = name.removeprefix("bytes:")
    return name.encode() if marked == name else bytes.fromhex(marked.replace("\\x", ""))
