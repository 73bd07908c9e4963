from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from nsm_core.engine.request import Event, Finished, FinishReason, PromptScored, TokenEvent, TokenLogprob
from service.choices import ChoiceView, Delta


def token(index: int, text: str, *, has_logprob: bool = True) -> TokenEvent:
    logprob = TokenLogprob(token_id=index, logprob=-1.0) if has_logprob else None
    return TokenEvent(index=index, token_id=index, text=text, logprob=logprob)


def finished(text: str = "", *, dropped: int = 0, reason: FinishReason = FinishReason.STOP) -> Finished:
    return Finished(reason=reason, text=text, num_dropped_tokens=dropped)


def feed_all(events: list[Event]) -> list[Delta]:
    view = ChoiceView()
    return [delta for event in events for delta in view.feed(event)]


def shown(deltas: list[Delta]) -> list[tuple[str, list[int]]]:
    return [(delta.text, [scored.token_id for scored in delta.tokens]) for delta in deltas]


def test_logprobs_of_held_back_tokens_join_the_next_piece() -> None:
    deltas = feed_all([token(1, "a"), token(2, ""), token(3, "bc"), finished()])
    assert shown(deltas) == [("a", [1]), ("bc", [2, 3]), ("", [])]


def test_S2_tokens_of_a_stop_string_never_appear() -> None:
    # "x" is visible, "<" and "end>" were the stop string
    deltas = feed_all([token(1, "x"), token(2, ""), token(3, ""), finished(dropped=2)])
    assert shown(deltas) == [("x", [1]), ("", [])]


def test_S2_what_was_held_back_in_vain_is_released_at_the_end() -> None:
    deltas = feed_all([token(1, ""), token(2, ""), finished("<e", reason=FinishReason.LENGTH)])
    assert shown(deltas) == [("<e", [1, 2]), ("", [])]


def test_a_stop_inside_a_token_shows_the_text_before_it_but_not_the_token() -> None:
    deltas = feed_all([token(1, "x"), token(2, ""), finished("y", dropped=1)])
    assert shown(deltas) == [("x", [1]), ("y", []), ("", [])]


def test_kept_tokens_without_text_are_shown_before_the_end() -> None:
    deltas = feed_all([token(1, ""), finished(reason=FinishReason.LENGTH)])
    assert shown(deltas) == [("", [1]), ("", [])]


def test_S4_the_last_delta_is_empty_and_carries_the_end() -> None:
    end = finished("tail", reason=FinishReason.LENGTH)
    last = feed_all([token(1, "a"), end])[-1]
    assert (last.text, last.tokens, last.finished) == ("", (), end)


def test_a_scored_prompt_is_a_delta_of_its_own() -> None:
    scores = (None, TokenLogprob(token_id=5, logprob=-0.5))
    assert feed_all([PromptScored(logprobs=scores)]) == [Delta(prompt=scores)]


def test_without_logprobs_there_are_only_pieces_of_text() -> None:
    deltas = feed_all([token(1, "", has_logprob=False), token(2, "ab", has_logprob=False), finished()])
    assert shown(deltas) == [("ab", []), ("", [])]


@given(st.lists(st.sampled_from(["", "a", "bc"]), max_size=12), st.integers(0, 12), st.sampled_from(["", "z"]))
def test_S1_pieces_joined_are_the_text_and_every_kept_token_appears_once(
    texts: list[str], dropped: int, tail: str
) -> None:
    # tokens that will be dropped have shown no text: the engine held it back
    dropped = min(dropped, len(texts))
    texts[len(texts) - dropped :] = [""] * dropped
    events: list[Event] = [token(index, text) for index, text in enumerate(texts, start=1)]
    deltas = feed_all([*events, finished(tail, dropped=dropped)])
    assert "".join(delta.text for delta in deltas) == "".join(texts) + tail
    kept = [scored.token_id for delta in deltas for scored in delta.tokens]
    assert kept == list(range(1, len(texts) - dropped + 1))
