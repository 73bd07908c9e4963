"""Texts that repeat themselves: nothing of a document is lost, what is inserted was said before."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from nsm_core.tokenizer import Tokenizer
from nsm_lab.training.data import TokenizedSplit
from nsm_lab.training.facts import make_fact
from nsm_lab.training.recall import FactBank, recall_split, with_recall

NUM_TOKENS = 60_000


@pytest.fixture(scope="module")
def bank(tiny_tokenizer: Tokenizer) -> FactBank:
    return FactBank.make(tiny_tokenizer, np.dtype("<u2"), seed=0)


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


@pytest.mark.parametrize("share", [0.05, 0.25])
def test_recall_inserts_about_its_share(bank: FactBank, share: float) -> None:
    written = with_recall(numbered(), share, bank, np.random.default_rng(1))
    assert 0.6 * share < 1.0 - NUM_TOKENS / len(written) < 1.4 * share


def test_recall_of_the_same_seed_is_the_same(bank: FactBank) -> None:
    first, second = (with_recall(numbered(5000), 0.2, bank, np.random.default_rng(3)) for _ in range(2))
    assert np.array_equal(first, second)


def test_fact_question_holds_the_value_of_its_statement() -> None:
    rng = random.Random(0)
    for _ in range(200):
        fact = make_fact(rng)
        said = set(fact.statement.replace(".", " ").replace(",", " ").replace('"', " ").split())
        asked = set(fact.question.replace(".", " ").replace(",", " ").replace('"', " ").split())
        assert any(word[0].isdigit() or word[0].isupper() or word.islower() for word in said & asked)
        assert len(said & asked) >= 3


def test_recall_split_copies_every_document_with_other_insertions(tiny_tokenizer: Tokenizer, tmp_path: Path) -> None:
    ids = np.concatenate((numbered(4000), numbered(3000), np.array([0], np.uint16)))
    split = TokenizedSplit(name="train", ids=ids, offsets=np.array([0, 4000, 7000]), num_bytes=100, num_words=20)
    made = recall_split(split, tiny_tokenizer, share=0.2, copies=2, seed=0)
    assert made.num_documents == 4
    assert (made.num_bytes, made.num_words) == (200, 40)
    assert made.ids[-1] == 0
    documents = [made.ids[a:b] for a, b in zip(made.offsets, made.offsets[1:], strict=False)]
    assert is_subsequence(ids[:4000], documents[0])
    assert is_subsequence(ids[4000:7000], documents[3])
    assert not np.array_equal(documents[0], documents[2])
