"""Texts that repeat themselves: nothing of a document is lost, what is inserted was said before."""

from __future__ import annotations

import random
import re
from pathlib import Path

import numpy as np
import pytest

from nsm_core.tokenizer import Tokenizer
from nsm_lab.training.data import TokenizedSplit, document_order
from nsm_lab.training.facts import KINDS, make_fact
from nsm_lab.training.passing import Vocabulary, make_mention
from nsm_lab.training.phrasings import THINGS, things_in
from nsm_lab.training.recall import (
    AFTER_WEIGHT,
    ALL_WORDS,
    ANSWER_WEIGHT,
    FAR_DISTANCE,
    LOOP_PERIOD,
    PASSAGE_TOKENS,
    UNPREDICTABLE_TOKENS,
    FactBank,
    RecallLoss,
    RecallMix,
    _encoded,
    recall_split,
    shares_by_time,
    with_recall,
)

NUM_TOKENS = 60_000
NUM_FACTS = 500
WORDS = Vocabulary(("lantern", "mountain", "house"), ("Ellen", "Norfolk"))


@pytest.fixture(scope="module")
def bank(tiny_tokenizer: Tokenizer) -> FactBank:
    return FactBank.make(tiny_tokenizer, np.dtype("<u2"), seed=0, num_facts=NUM_FACTS)


def numbered(tokens: int = NUM_TOKENS) -> np.ndarray:
    """Every token once, so that what is inserted can be told from what was there."""
    return np.arange(1, tokens + 1, dtype=np.uint16)


def is_subsequence(part: np.ndarray, whole: np.ndarray) -> bool:
    rest = iter(whole.tolist())
    return all(token in rest for token in part.tolist())


def test_recall_keeps_every_token_of_the_document_in_order(bank: FactBank) -> None:
    document = numbered()
    written, weights, turns = with_recall(document, 0.2, bank, np.random.default_rng(0), loops=0.1)
    assert len(weights) == len(turns) == len(written)
    assert is_subsequence(document, written)


@pytest.mark.parametrize("share", [0.1, 0.25])
def test_recall_inserts_about_its_share(bank: FactBank, share: float) -> None:
    written = with_recall(numbered(), share, bank, np.random.default_rng(1)).ids
    assert 0.6 * share < 1.0 - NUM_TOKENS / len(written) < 1.4 * share


def test_recall_of_the_same_seed_is_the_same(bank: FactBank) -> None:
    first, second = (with_recall(numbered(5000), 0.2, bank, np.random.default_rng(3), 0.05)[0] for _ in range(2))
    assert np.array_equal(first, second)


def test_fact_questions_hold_what_their_statement_says() -> None:
    rng = random.Random(0)
    for _ in range(500):
        fact = make_fact(rng)
        texts = (fact.statement, *(question.text for question in fact.questions))
        said, *asked = (set(re.findall(r"\w+", text)) for text in texts)
        assert 1 <= len(asked) <= 3
        assert len(set(fact.questions)) == len(asked)
        assert all(len(said & words) >= 2 for words in asked)


def test_answers_of_questions_are_what_their_statement_says() -> None:
    rng = random.Random(2)
    for _ in range(500):
        fact = make_fact(rng)
        for question in fact.questions:
            assert question.answers
            assert all(question.text[first:last] in fact.statement for first, last in question.answers)


def test_only_answers_of_a_question_and_their_ends_have_weight(tiny_tokenizer: Tokenizer) -> None:
    rng = random.Random(0)
    made = [make_mention(rng, WORDS) for _ in range(100)]
    texts = [question for fact in made for question in fact.questions]
    encoded = _encoded(tiny_tokenizer, texts, np.dtype("<u2"), RecallLoss(first_answer=9))
    for (ids, weights), question in zip(encoded, texts, strict=True):
        assert tiny_tokenizer.decode(ids.tolist()) == question.text
        assert {9} <= set(weights.tolist()) <= {0, ANSWER_WEIGHT, AFTER_WEIGHT, 9}
        heard = tiny_tokenizer.decode(ids[(weights > 0) & (weights != AFTER_WEIGHT)].tolist())
        assert all(question.text[first:last] in heard for first, last in question.answers)


def test_the_first_token_of_an_answer_may_weigh_more(tiny_tokenizer: Tokenizer) -> None:
    loss = RecallLoss(first_answer=9)
    bank = FactBank.make(tiny_tokenizer, np.dtype("<u2"), seed=0, num_facts=20, loss=loss)
    for _, weights in (question for questions in bank.questions for question in questions):
        starts = np.flatnonzero((weights > 0) & (np.concatenate(([0], weights[:-1])) == 0))
        assert len(starts)
        assert set(weights[starts].tolist()) == {9}
        assert set(weights.tolist()) <= {0, ANSWER_WEIGHT, AFTER_WEIGHT, 9}


def test_every_word_that_is_inserted_may_count(tiny_tokenizer: Tokenizer) -> None:
    bank = FactBank.make(tiny_tokenizer, np.dtype("<u2"), seed=0, num_facts=NUM_FACTS, loss=ALL_WORDS)
    weights = with_recall(numbered(), 0.2, bank, np.random.default_rng(6)).weights
    assert set(weights.tolist()) == {1}


def test_a_loop_has_no_weight_and_the_document_goes_on_behind_it(bank: FactBank) -> None:
    written, weights, turns = with_recall(numbered(), 1e-6, bank, np.random.default_rng(5), loops=0.2)
    assert np.array_equal(written[weights > 0], numbered())
    assert 0.1 < (weights == 0).mean() < 0.3
    assert np.array_equal(turns > 0, weights == 0)
    again = np.flatnonzero(turns)
    assert np.array_equal(written[again], written[again - turns[again]])
    starts = again[turns[again - 1] == 0]
    assert LOOP_PERIOD[0] <= turns[starts].min()
    assert turns[starts].max() <= LOOP_PERIOD[1]


def test_the_first_tokens_of_a_passage_that_returns_have_no_weight(bank: FactBank) -> None:
    written, weights, _ = with_recall(numbered(), 0.2, bank, np.random.default_rng(6))
    at = 0
    returned = []
    while at + 1 < len(written):
        if weights[at] == 0 and written[at] < NUM_TOKENS and (weights[at : at + UNPREDICTABLE_TOKENS] == 0).all():
            following = np.diff(written[at : at + PASSAGE_TOKENS[0]].astype(np.int64))
            returned += [at] if (following == 1).all() else []
            at += UNPREDICTABLE_TOKENS
        at += 1
    assert len(returned) > 20


def test_far_passages_return_from_far_and_weigh_what_they_are_told_to(tiny_tokenizer: Tokenizer) -> None:
    loss = RecallLoss(passage=2)
    bank = FactBank.make(tiny_tokenizer, np.dtype("<u2"), seed=0, num_facts=20, loss=loss)
    document, mix = numbered(), RecallMix(passages=1.0, far=1.0)
    ids, weights, _ = with_recall(document, 0.2, bank, np.random.default_rng(6), mix=mix)
    heavy = np.flatnonzero(weights == loss.passage)
    assert len(heavy)
    nearest, farthest = FAR_DISTANCE
    for at in heavy[:: len(heavy) // 50].tolist():
        earlier = np.flatnonzero(ids[:at] == ids[at])
        assert any(nearest <= at - before <= farthest for before in earlier.tolist())


def test_a_mix_without_passages_repeats_none(bank: FactBank) -> None:
    document = numbered(20_000) + 40_000  # ids that no fact has
    ids = with_recall(document, 0.2, bank, np.random.default_rng(7), mix=RecallMix(passages=0.0)).ids
    assert np.array_equal(ids[ids > 40_000], document)
    assert len(ids) > len(document)


def test_facts_never_use_the_sentences_that_evaluation_asks_with() -> None:
    templates = " ".join(text for kind in KINDS.values() for texts in kind for text in texts).lower()
    assert "pass" not in templates.replace("passport", "")
    assert "remember it" not in templates
    assert "what is the" not in templates


def test_facts_are_about_things_that_the_text_names_but_for_those_of_evaluation() -> None:
    text = "the harbour lay before the passport of the keyboard and the castle. " * 30 + "the once"
    things = things_in([text], random.Random(0))
    assert {"harbour", "castle"} <= set(things)
    assert set(things) & {"passport", "keyboard", "once"} == set()
    assert {word for thing in things[:100] for word in thing.split()} == {"harbour", "castle"}
    made = [make_fact(random.Random(seed), things) for seed in range(200)]
    assert sum("castle" in fact.statement for fact in made) > 20
    assert things_in(["nothing"], random.Random(0)) == THINGS


@pytest.mark.parametrize("digits", [3, 6])
def test_facts_ask_for_numbers_of_all_lengths(digits: int) -> None:
    rng = random.Random(1)
    made = [make_fact(rng) for _ in range(400)]
    assert any(len(number) == digits for fact in made for number in re.findall(r"\d+", fact.statement))


def test_recall_asks_every_question_of_a_fact_that_has_room(bank: FactBank) -> None:
    assert bank.mean_tokens > np.mean([len(ids) for ids, _ in bank.statements])
    assert all(1 <= len(questions) <= 3 for questions in bank.questions)


def test_recall_split_copies_every_document_with_other_insertions(tiny_tokenizer: Tokenizer, tmp_path: Path) -> None:
    words = np.concatenate((numbered(4000), numbered(3000))) % tiny_tokenizer.vocab_size
    ids = np.append(words, 0).astype(np.uint16)
    split = TokenizedSplit(name="train", ids=ids, offsets=np.array([0, 4000, 7000]), num_bytes=100, num_words=20)
    made = recall_split(split, tiny_tokenizer, shares=[0.2] * 4, seed=0, num_facts=NUM_FACTS)
    assert made.num_documents == 4
    assert made.weights is not None
    assert len(made.weights) == len(made.ids)
    assert (made.num_bytes, made.num_words) == (200, 40)
    assert made.ids[-1] == 0
    documents = [made.ids[a:b] for a, b in zip(made.offsets, made.offsets[1:], strict=False)]
    assert is_subsequence(ids[:4000], documents[0])
    assert is_subsequence(ids[4000:7000], documents[3])
    assert not np.array_equal(documents[0], documents[2])


def test_shares_by_time_follow_the_order_in_which_rows_read() -> None:
    """Two rows: each reads its half of the order from the first share to the last."""
    lengths = np.full(1000, 64)
    split = TokenizedSplit(
        name="train", ids=np.zeros(64_001, np.uint16), offsets=np.cumsum([0, *lengths]), num_bytes=1, num_words=1
    )
    shares = shares_by_time(split, shares=(0.3, 0.1), copies=2, strips=2, read=1.0, seed=3)
    in_order = shares[document_order(3, 0, 2000)].reshape(2, 1000)
    np.testing.assert_allclose(in_order[0], in_order[1])
    np.testing.assert_allclose(in_order[0], np.linspace(0.3, 0.1, 1000), atol=1e-3)


def test_shares_by_time_reach_the_last_share_where_the_run_ends() -> None:
    split = TokenizedSplit(
        name="train", ids=np.zeros(641, np.uint16), offsets=np.arange(0, 641, 64), num_bytes=1, num_words=1
    )
    shares = shares_by_time(split, shares=(0.3, 0.1), copies=1, strips=1, read=0.5, seed=0)
    np.testing.assert_allclose(shares[document_order(0, 0, 10)][5:], 0.1)


def test_a_sentence_in_passing_stands_between_two_sentences(tiny_tokenizer: Tokenizer) -> None:
    bank = FactBank.make(tiny_tokenizer, np.dtype("<u2"), seed=0, num_facts=NUM_FACTS)
    text = "The old ship came home. It lay in the harbour. Nobody spoke. " * 2000
    document = np.array([tiny_tokenizer.end_of_text_id, *tiny_tokenizer.encode(text)], np.uint16)
    inline = [ids for (ids, _), is_inline in zip(bank.statements, bank.is_inline, strict=True) if is_inline]
    written = tiny_tokenizer.decode(with_recall(document, 0.2, bank, np.random.default_rng(0)).ids[1:].tolist())
    found = [statement for ids in inline if (statement := tiny_tokenizer.decode(ids.tolist())) in written]
    assert found
    for statement in found:
        before = written[: written.index(statement)]
        assert before[-1] in '.!?"\n'
