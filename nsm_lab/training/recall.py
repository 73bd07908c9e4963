"""Texts whose earlier parts are needed again: passages that return, facts that are asked for later.

Books rarely repeat themselves word by word, so a model that is trained on them alone has little reason to keep what has
left its attention windows. Here passages of a document return later in it, and invented facts are stated and asked for.
Distances are even on a log scale: every octave teaches as much.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
import multiprocessing
import random
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from nsm_core.tokenizer import Tokenizer
from nsm_lab.training.data import TokenizedSplit, document_order
from nsm_lab.training.facts import make_fact

PASSAGE_TOKENS = (24, 320)  # shortest and longest passage that returns
PASSAGE_DISTANCE = (384, 32_768)  # tokens from its beginning to its return
FACT_DISTANCE = (96, 49_152)  # tokens from a statement to a question
PARAGRAPH_TOKENS = 400  # farthest that a fact waits for the end of a paragraph
FACT_SHARE = 0.35  # of all insertions, by their number; a fact's questions belong to its statement
NUM_FACTS = 32_768  # made for a run

Ids = npt.NDArray[np.unsignedinteger]


@dataclasses.dataclass(frozen=True, slots=True)
class FactBank:
    """Token ids of statements and of their questions, and the ids after which a paragraph may begin."""

    statements: tuple[Ids, ...]
    questions: tuple[tuple[Ids, ...], ...]
    paragraph_ends: Ids

    @property
    def mean_tokens(self) -> float:
        """Of a fact with all its questions."""
        asked = sum(len(ids) for questions in self.questions for ids in questions)
        return (sum(map(len, self.statements)) + asked) / len(self.statements)

    @classmethod
    def make(
        cls, tokenizer: Tokenizer, dtype: np.dtype[np.unsignedinteger], seed: int, num_facts: int = NUM_FACTS
    ) -> FactBank:
        rng = random.Random(seed)
        facts = [make_fact(rng) for _ in range(num_facts)]
        texts = [text for fact in facts for text in (fact.statement, *fact.questions)]
        encoded = iter([np.array(ids, dtype) for ids in tokenizer.encode_batch(texts)])
        of_facts = [(next(encoded), tuple(next(encoded) for _ in fact.questions)) for fact in facts]
        statements, questions = (tuple(parts) for parts in zip(*of_facts, strict=True))
        return cls(statements, questions, np.unique([ids[-1] for ids in statements]).astype(dtype))


def _log_uniform(rng: np.random.Generator, bounds: tuple[int, int]) -> int:
    return int(np.exp(rng.uniform(*np.log(bounds))))


class _Writer:
    """A document that grows: read in any place, written at its end."""

    def __init__(self, capacity: int, dtype: np.dtype[np.unsignedinteger]) -> None:
        self._ids, self.length = np.empty(capacity, dtype), 0

    @property
    def ids(self) -> Ids:
        return self._ids[: self.length]

    def append(self, ids: Ids) -> None:
        if self.length + len(ids) > len(self._ids):
            self._ids = np.concatenate((self._ids, np.empty_like(self._ids)))
        self._ids[self.length : self.length + len(ids)] = ids
        self.length += len(ids)


def with_recall(document: Ids, share: float, bank: FactBank, rng: np.random.Generator) -> Ids:
    """`document` begins with the end-of-text token; about `share` of the result's tokens are inserted."""
    written = _Writer(int(len(document) / (1.0 - share) * 1.2) + 1024, document.dtype)
    gap = _mean_inserted(bank) * (1.0 - share) / share
    ends = _paragraph_ends(document, bank)
    questions: list[tuple[int, int, int]] = []  # where it is due, which fact, which of its questions
    at = 0
    while True:
        nearest = at + 1 + int(rng.exponential(gap))
        if questions:
            nearest = min(nearest, max(at + 1, at + questions[0][0] - written.length))
        asks = bool(questions) and nearest - at >= questions[0][0] - written.length
        states = not asks and rng.random() < FACT_SHARE
        if asks or states:
            nearest = _paragraph_after(nearest, ends)
        if nearest >= len(document):
            written.append(document[at:])
            return written.ids
        written.append(document[at:nearest])
        at = nearest
        if asks:
            _, fact, which = heapq.heappop(questions)
            written.append(bank.questions[fact][which])
        elif states:
            fact = int(rng.integers(len(bank.statements)))
            for which in range(len(bank.questions[fact])):
                heapq.heappush(questions, (written.length + _log_uniform(rng, FACT_DISTANCE), fact, which))
            written.append(bank.statements[fact])
        else:
            _repeat(written, rng)


def _mean_inserted(bank: FactBank) -> float:
    """Tokens that an insertion adds in the end."""
    shortest, longest = PASSAGE_TOKENS
    passage = (longest - shortest) / math.log(longest / shortest)
    return (1.0 - FACT_SHARE) * passage + FACT_SHARE * bank.mean_tokens


def _paragraph_after(at: int, ends: npt.NDArray[np.int64]) -> int:
    """Where the next paragraph begins; `at` itself where that is far away."""
    index = int(np.searchsorted(ends, at))
    is_near = index < len(ends) and ends[index] - at <= PARAGRAPH_TOKENS
    return int(ends[index]) if is_near else at


def _paragraph_ends(document: Ids, bank: FactBank) -> npt.NDArray[np.int64]:
    """Where a paragraph may begin: after the last of the line breaks between two."""
    is_break = np.isin(document, bank.paragraph_ends)
    return np.flatnonzero(is_break[:-1] & ~is_break[1:]) + 1


def _repeat(written: _Writer, rng: np.random.Generator) -> None:
    length, distance = _log_uniform(rng, PASSAGE_TOKENS), _log_uniform(rng, PASSAGE_DISTANCE)
    start = written.length - distance
    if start < 1:
        return
    written.append(written.ids[start : start + min(length, distance)].copy())


def _one(job: tuple[Ids, float, int, int, int]) -> Ids:
    document, share, seed, copy, index = job
    return with_recall(document, share, _BANK[0], np.random.default_rng((seed, copy, index)))


_BANK: list[FactBank] = []  # of this process's workers


def shares_by_time(
    split: TokenizedSplit, *, shares: tuple[float, float], copies: int, strips: int, read: float, seed: int
) -> npt.NDArray[np.float64]:
    """[copies * documents]: the share of each copy of a document, from `shares[0]` for those that the first epoch of
    `PackedBatches` reads first to `shares[1]` for those that it reads last.

    `strips`: rows of all processes. `read`: the part of the epoch that the run reads.
    """
    lengths = np.tile(np.diff(split.offsets), copies)
    order = document_order(seed, 0, len(lengths))
    strip = lengths.sum() / strips
    when = np.empty(len(lengths))
    when[order] = (np.cumsum(lengths[order]) - lengths[order] / 2) % strip / strip
    first, last = shares
    return first + (last - first) * np.minimum(when / read, 1.0)


def recall_split(
    split: TokenizedSplit,
    tokenizer: Tokenizer,
    *,
    shares: Sequence[float],
    seed: int,
    workers: int = 1,
    num_facts: int = NUM_FACTS,
) -> TokenizedSplit:
    """Copies of every document of `split`, each with other insertions, in memory: one for each of `shares`.

    `shares` [copies * documents], each in (0, 1): of the first copies of all documents, of the second, and so on.
    The bytes and words that the split counts are those of the documents without insertions.
    """
    _BANK[:] = [FactBank.make(tokenizer, split.ids.dtype, seed, num_facts)]
    jobs = []
    for number, share in enumerate(shares):
        copy, index = divmod(number, split.num_documents)
        ids = np.asarray(split.ids[split.offsets[index] : split.offsets[index + 1]])
        jobs.append((ids, float(share), seed, copy, index))
    copies = len(jobs) // split.num_documents
    documents = _run(jobs, workers)
    _BANK.clear()
    offsets = np.cumsum([0, *(len(document) for document in documents)], dtype=np.int64)
    ids = np.concatenate([*documents, split.ids[-1:]])
    return dataclasses.replace(
        split, ids=ids, offsets=offsets, num_bytes=copies * split.num_bytes, num_words=copies * split.num_words
    )


def _run(jobs: Sequence[tuple[Ids, float, int, int, int]], workers: int) -> list[Ids]:
    if workers == 1:
        return [_one(job) for job in jobs]
    with multiprocessing.get_context("fork").Pool(workers) as pool:
        return pool.map(_one, jobs, chunksize=8)
