"""What a session keeps: however a turn ends, its state is that of one run over the log, and the log is what showed."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nsm_core.engine.request import FinishReason
from nsm_core.tokenizer import Tokenizer
from tests.nsm_core.engine.harness import (
    Outcome,
    ScriptedModel,
    assert_log_and_state_agree,
    make_engine,
    make_request,
    random_ids,
    resume_from,
    run_all,
    run_one,
    small_model,
)
from tests.support.counts import scaled

pytestmark = pytest.mark.usefixtures("waiting_or_overlapped")

PROMPT_IDS = (0, 9, 4)


def run_script(
    tokenizer: Tokenizer, script: list[int], *, stop: tuple[str, ...] = (), max_tokens: int = 1000
) -> Outcome:
    """A model that says exactly `script` and then end of text."""
    model = ScriptedModel(script, vocab_size=512, prompt_len=len(PROMPT_IDS))
    request = make_request(prompt_ids=PROMPT_IDS, stop=stop, max_tokens=max_tokens, ignore_eos=False)
    outcome = run_one(make_engine(model, tokenizer), request)
    assert_log_and_state_agree(model, outcome.end_state)
    assert_visible_ids_agree(tokenizer, outcome)
    return outcome


def assert_visible_ids_agree(tokenizer: Tokenizer, outcome: Outcome) -> None:
    end = outcome.end_state
    visible_ids = end.new_ids[len(PROMPT_IDS) :]
    assert end.new_ids[: len(PROMPT_IDS)] == PROMPT_IDS
    assert tokenizer.decode(visible_ids) == outcome.text
    assert end.generated_counts == {token_id: visible_ids.count(token_id) for token_id in visible_ids}
    assert outcome.finished.completion_tokens == len(outcome.ids)


def one_token_each(tokenizer: Tokenizer, text: str) -> list[int]:
    """A token for each byte."""
    return [token_id for byte in text.encode() for token_id in tokenizer.encode_bytes(bytes([byte]))]


def test_R12_length_leaves_the_last_token_pending(tiny_tokenizer: Tokenizer) -> None:
    script = tiny_tokenizer.encode("It was the best of times")
    outcome = run_script(tiny_tokenizer, script, max_tokens=4)
    assert outcome.finished.reason is FinishReason.LENGTH
    assert outcome.end_state.pending == script[3]
    assert outcome.end_state.new_ids == (*PROMPT_IDS, *script[:4])
    assert outcome.end_state.position == len(PROMPT_IDS) + 3


def test_R12_end_of_text_is_dropped_and_leaves_no_pending_token(tiny_tokenizer: Tokenizer) -> None:
    script = tiny_tokenizer.encode("It was the best")
    outcome = run_script(tiny_tokenizer, script)
    assert outcome.finished.reason is FinishReason.STOP
    assert outcome.finished.stop_reason is None
    assert outcome.finished.num_dropped_tokens == 1
    assert outcome.end_state.pending is None
    assert outcome.end_state.new_ids == (*PROMPT_IDS, *script)


def test_R12_end_of_text_at_once_leaves_the_state_after_the_prompt(tiny_tokenizer: Tokenizer) -> None:
    outcome = run_script(tiny_tokenizer, [])
    assert outcome.end_state.new_ids == PROMPT_IDS
    assert (outcome.end_state.pending, outcome.end_state.position) == (None, len(PROMPT_IDS))


def test_R12_a_stop_id_is_dropped_like_end_of_text(tiny_tokenizer: Tokenizer) -> None:
    script = tiny_tokenizer.encode("one two three")
    model = ScriptedModel(script, vocab_size=512)
    outcome = run_one(make_engine(model, tiny_tokenizer), make_request(stop_token_ids=(script[2],), stop=("two th",)))
    assert outcome.finished.stop_reason == script[2]
    assert outcome.finished.num_dropped_tokens == 1
    assert outcome.end_state.new_ids == (0, *script[:2])
    assert outcome.end_state.pending is None
    assert_log_and_state_agree(model, outcome.end_state)


@pytest.mark.parametrize("stop", ["STOP", "OP", "P", "o STOP", "Hello STOP", "TOPs"])
def test_R12_S2_a_stop_string_over_single_byte_tokens(stop: str, tiny_tokenizer: Tokenizer) -> None:
    text = "Hello STOPs here"
    outcome = run_script(tiny_tokenizer, one_token_each(tiny_tokenizer, text), stop=(stop,))
    visible = text[: text.index(stop)]
    assert outcome.text == visible
    assert outcome.finished.stop_reason == stop
    assert outcome.finished.num_dropped_tokens == len(stop)
    assert len(outcome.ids) == len(visible) + len(stop)
    visible_ids = one_token_each(tiny_tokenizer, visible)
    assert outcome.end_state.new_ids == (*PROMPT_IDS, *visible_ids)
    # single-byte stops end in the token that was not fed yet: nothing is to be taken back, and nothing is pending
    assert outcome.end_state.pending is None or outcome.end_state.pending == visible_ids[-1]


def test_R12_a_token_cut_in_the_middle_is_replaced_by_its_visible_bytes(tiny_tokenizer: Tokenizer) -> None:
    cut = next(index for index in range(1, 512) if tiny_tokenizer.token_bytes(index) == b" the")
    script = [*tiny_tokenizer.encode("in"), cut, *tiny_tokenizer.encode(" end")]
    outcome = run_script(tiny_tokenizer, script, stop=("he e",))
    assert outcome.text == "in t"
    visible_ids = outcome.end_state.new_ids[len(PROMPT_IDS) :]
    assert cut not in visible_ids
    assert outcome.end_state.pending == visible_ids[-1]


def test_R12_a_stop_string_that_cuts_a_character_token_of_the_last_step(tiny_tokenizer: Tokenizer) -> None:
    """The visible tail belongs to the token sampled last: nothing is taken back, the tail is fed."""
    long_id = next(index for index in range(1, 512) if len(tiny_tokenizer.token_bytes(index)) >= 4)
    raw = tiny_tokenizer.token_bytes(long_id).decode()
    outcome = run_script(tiny_tokenizer, [*tiny_tokenizer.encode("x"), long_id], stop=(raw[-1],))
    assert outcome.text == "x" + raw[:-1]


def test_held_text_without_a_match_is_released_and_logged(tiny_tokenizer: Tokenizer) -> None:
    script = tiny_tokenizer.encode("a STO and a STORM")
    outcome = run_script(tiny_tokenizer, script, stop=("STOP", "STORMS"))
    assert outcome.text == "a STO and a STORM"
    assert outcome.end_state.new_ids == (*PROMPT_IDS, *script)


def test_endless_hold_makes_few_state_copies(tiny_tokenizer: Tokenizer) -> None:
    """ "aab" begins anew at each "a": the held text moves on for 500 tokens, then matches."""
    script = one_token_each(tiny_tokenizer, "a" * 500 + "b")
    outcome = run_script(tiny_tokenizer, script, stop=("aab",))
    assert outcome.text == "a" * 498


@pytest.mark.parametrize("stop", [("STOP",), ("é", "ñx"), ("ab", "b"), ("\n\n",)], ids=str)
@settings(max_examples=scaled(40, 2000))
@given(data=st.data())
def test_R12_S2_any_text_in_any_tokens_with_any_stop(
    data: st.DataObject, stop: tuple[str, ...], tiny_tokenizer: Tokenizer
) -> None:
    """Text made of pieces of the stop strings, cut into tokens anywhere, also inside characters."""
    pieces = st.sampled_from([*stop, *(char for text in stop for char in text), "x", "é", " the", "\n"])
    raw = "".join(data.draw(st.lists(pieces, max_size=12))).encode()
    cuts = sorted(data.draw(st.sets(st.integers(0, len(raw)), max_size=8)) | {0, len(raw)})
    script = [
        token_id for start, end in itertools.pairwise(cuts) for token_id in tiny_tokenizer.encode_bytes(raw[start:end])
    ]
    max_tokens = data.draw(st.sampled_from([3, 1000]))
    outcome = run_script(tiny_tokenizer, script, stop=stop, max_tokens=max_tokens)
    assert not any(text in outcome.text for text in stop)
    if outcome.finished.stop_reason is not None:
        assert outcome.finished.stop_reason in stop


@pytest.mark.parametrize("seed", range(scaled(6, 200)))
def test_R4_R12_session_after_a_stop_string_continues_without_it(seed: int, tiny_tokenizer: Tokenizer) -> None:
    """Nothing is drafted ahead here: the only tokens that are sampled and then rejected are those of a stop."""
    engine, model = make_engine(small_model(), tiny_tokenizer), small_model()
    free = run_one(engine, make_request(prompt_ids=random_ids(seed, 12), max_tokens=30))
    stop = free.text[8 + seed % 7 :][: 1 + seed % 5]
    request = make_request("stopped", random_ids(seed, 12), max_tokens=30, stop=(stop,))
    others = [make_request(str(number), random_ids(50 + number, 20)) for number in range(3)]
    stopped = run_all(engine, [*others, request])["stopped"]
    if "\ufffd" not in stop:  # a bad byte's replacement does not match: stop strings match bytes
        assert stopped.text == free.text[: free.text.index(stop)]
    end = stopped.end_state
    assert_log_and_state_agree(model, end)
    resume, pending = resume_from(end)
    log = end.new_ids if end.pending is None else end.new_ids[:-1]
    resumed = run_one(engine, make_request(prompt_ids=(*pending, 77), resume=resume, max_tokens=5))
    unbroken = run_one(engine, make_request(prompt_ids=(*log, *pending, 77), max_tokens=5))
    assert resumed.ids == unbroken.ids


def test_no_state_where_none_was_asked_for(tiny_tokenizer: Tokenizer) -> None:
    outcome = run_one(make_engine(small_model(), tiny_tokenizer), make_request(keep_state=False, stop=("x",)))
    assert outcome.finished.end_state is None
