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
from nsm_lab.training.recall import FactBank, recall_split, shares_by_time, with_recall

NUM_TOKENS = 60_000
NUM_FACTS = 500


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
    written = with_recall(document, 0.2, bank, np.random.default_rng(0))
    assert is_subsequence(document, written)


@pytest.mark.parametrize("share", [0.1, 0.25])
def test_recall_inserts_about_its_share(bank: FactBank, share: float) -> None:
    written = with_recall(numbered(), share, bank, np.random.default_rng(1))
    assert 0.6 * share < 1.0 - NUM_TOKENS / len(written) < 1.4 * share


def test_recall_of_the_same_seed_is_the_same(bank: FactBank) -> None:
    first, second = (with_recall(numbered(5000), 0.2, bank, np.random.default_rng(3)) for _ in range(2))
    assert np.array_equal(first, second)


def test_fact_questions_hold_what_their_statement_says() -> None:
    rng = random.Random(0)
    for _ in range(500):
        fact = make_fact(rng)
        said, *asked = (set(re.findall(r"\w+", text)) for text in (fact.statement, *fact.questions))
        assert 1 <= len(asked) <= 3
        assert len(set(fact.questions)) == len(asked)
        assert all(len(said & words) >= 2 for words in asked)


def test_facts_never_use_the_sentences_that_evaluation_asks_with() -> None:
    templates = " ".join(text for kind in KINDS.values() for texts in kind for text in texts).lower()
    assert "pass" not in templates.replace("passport", "")
    assert "remember it" not in templates


@pytest.mark.parametrize("digits", [3, 6])
def test_facts_ask_for_numbers_of_all_lengths(digits: int) -> None:
    rng = random.Random(1)
    made = [make_fact(rng) for _ in range(400)]
    assert any(len(number) == digits for fact in made for number in re.findall(r"\d+", fact.statement))


def test_recall_asks_every_question_of_a_fact_that_has_room(bank: FactBank) -> None:
    assert bank.mean_tokens > np.mean([len(ids) for ids in bank.statements])
    assert all(1 <= len(questions) <= 3 for questions in bank.questions)


def test_recall_split_copies_every_document_with_other_insertions(tiny_tokenizer: Tokenizer, tmp_path: Path) -> None:
    ids = np.concatenate((numbered(4000), numbered(3000), np.array([0], np.uint16)))
    split = TokenizedSplit(name="train", ids=ids, offsets=np.array([0, 4000, 7000]), num_bytes=100, num_words=20)
    made = recall_split(split, tiny_tokenizer, shares=[0.2] * 4, seed=0, num_facts=NUM_FACTS)
    assert made.num_documents == 4
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
