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
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from nsm_core.tokenizer import Tokenizer
from nsm_lab.training.data import TokenizedSplit, document_order
from nsm_lab.training.facts import Question, make_fact
from nsm_lab.training.phrasings import things_in

PASSAGE_TOKENS = (24, 320)  # shortest and longest passage that returns
PASSAGE_DISTANCE = (640, 40_960)  # tokens from its beginning to its return
UNPREDICTABLE_TOKENS = 8  # of a passage that returns, the first: nothing says that it will
FACT_DISTANCE = (192, 49_152)  # tokens from a statement to a question
PARAGRAPH_TOKENS = 400  # farthest that a fact waits for the end of a paragraph
FACT_SHARE = 0.6  # of all insertions, by their number; a fact's questions belong to its statement
NAMING_DOCUMENTS, NAMING_TOKENS = 400, 50_000  # from which facts take the names of things
NUM_FACTS = 32_768  # made for a run
ANSWER_WEIGHT = 3  # of a token that a question asks for, in the loss
LOOP_PERIOD = (8, 320)  # tokens that are said again at once
LOOP_TURNS = 3  # how often at most
LOOP_TOKENS = 400  # longest loop

Ids = npt.NDArray[np.unsignedinteger]
Weights = npt.NDArray[np.uint8]  # of tokens, in the loss; 0: read, but not to be said


@dataclasses.dataclass(frozen=True, slots=True)
class RecallLoss:
    """How much tokens of what is inserted weigh in the loss; a token of the document weighs 1.

    `first_answer`: the first token of an answer, `answer` its others, `others` statements, the rest of a question, and
    the first tokens of a passage, `silent` in number.
    """

    answer: int = ANSWER_WEIGHT
    first_answer: int = ANSWER_WEIGHT
    others: int = 0
    silent: int = UNPREDICTABLE_TOKENS


ANSWERS_ALONE = RecallLoss()
ALL_WORDS = RecallLoss(answer=1, first_answer=1, others=1)


@dataclasses.dataclass(frozen=True, slots=True)
class FactBank:
    """Token ids of statements and of their questions, and the ids after which a paragraph may begin.

    A question comes with the weights of its tokens, by `loss`.
    """

    statements: tuple[Ids, ...]
    questions: tuple[tuple[tuple[Ids, Weights], ...], ...]
    paragraph_ends: Ids
    loss: RecallLoss = ANSWERS_ALONE

    @property
    def mean_tokens(self) -> float:
        """Of a fact with all its questions."""
        asked = sum(len(ids) for questions in self.questions for ids, _ in questions)
        return (sum(map(len, self.statements)) + asked) / len(self.statements)

    @classmethod
    def make(
        cls,
        tokenizer: Tokenizer,
        dtype: np.dtype[np.unsignedinteger],
        seed: int,
        num_facts: int = NUM_FACTS,
        loss: RecallLoss = ANSWERS_ALONE,
        texts: Iterable[str] = (),
    ) -> FactBank:
        """`texts`: of the things in them facts are made."""
        rng = random.Random(seed)
        things = things_in(texts, random.Random(seed))
        facts = [make_fact(rng, things) for _ in range(num_facts)]
        encoded = tokenizer.encode_batch([fact.statement for fact in facts])
        statements = tuple(np.array(ids, dtype) for ids in encoded)
        asked = iter(_encoded(tokenizer, [question for fact in facts for question in fact.questions], dtype, loss))
        questions = tuple(tuple(next(asked) for _ in fact.questions) for fact in facts)
        return cls(statements, questions, np.unique([ids[-1] for ids in statements]).astype(dtype), loss)


def _encoded(
    tokenizer: Tokenizer, questions: Sequence[Question], dtype: np.dtype[np.unsignedinteger], loss: RecallLoss
) -> list[tuple[Ids, Weights]]:
    """An answer's tokens are those that the text before it, alone, does not have, up to those after it."""
    texts = [question.text for question in questions]
    borders = [text[:at] for text, question in zip(texts, questions, strict=True) for at in sum(question.answers, ())]
    whole, starts = tokenizer.encode_batch(texts), iter(tokenizer.encode_batch(borders))
    made = []
    for ids, question in zip(whole, questions, strict=True):
        weights = np.full(len(ids), loss.others, np.uint8)
        for _ in question.answers:
            first, last = _shared(ids, next(starts)), _shared(ids, next(starts))
            weights[first : max(first + 1, last)] = loss.answer
            weights[first] = loss.first_answer
        made.append((np.array(ids, dtype), weights))
    return made


def _shared(ids: Sequence[int], others: Sequence[int]) -> int:
    """Tokens that both begin with."""
    pairs = enumerate(zip(ids, others, strict=False))
    return next((at for at, (one, other) in pairs if one != other), min(len(ids), len(others)))


def _log_uniform(rng: np.random.Generator, bounds: tuple[int, int]) -> int:
    return int(np.exp(rng.uniform(*np.log(bounds))))


class _Writer:
    """A document that grows: read in any place, written at its end."""

    def __init__(self, capacity: int, dtype: np.dtype[np.unsignedinteger]) -> None:
        self._ids, self._weights = np.empty(capacity, dtype), np.empty(capacity, np.uint8)
        self.length = 0

    @property
    def ids(self) -> Ids:
        return self._ids[: self.length]

    @property
    def weights(self) -> Weights:
        return self._weights[: self.length]

    def append(self, ids: Ids, weights: Weights | int) -> None:
        end = self.length + len(ids)
        if end > len(self._ids):
            self._ids, self._weights = (
                np.concatenate((held, np.empty(max(len(held), len(ids)), held.dtype)))
                for held in (self._ids, self._weights)
            )
        self._ids[self.length : end], self._weights[self.length : end] = ids, weights
        self.length = end


def with_recall(
    document: Ids, share: float, bank: FactBank, rng: np.random.Generator, loops: float = 0.0
) -> tuple[Ids, Weights]:
    """`document` begins with the end-of-text token; about `share` of the result's tokens are inserted to be recalled.

    About `loops` of them stand in loops: what was said just before is said again, up to LOOP_TURNS times, and then the
    text goes on. Tokens of a loop have no weight, so all that is learned from it is to leave it.
    """
    written = _Writer(int(len(document) / (1.0 - share - loops) * 1.2) + 1024, document.dtype)
    of_recall, of_loops = share / _mean_inserted(bank), loops / _mean_loop()  # insertions a token of the result
    gap = (1.0 - share - loops) / (of_recall + of_loops)
    ends = _paragraph_ends(document, bank)
    questions: list[tuple[int, int, int]] = []  # where it is due, which fact, which of its questions
    at = 0
    while True:
        nearest = at + 1 + int(rng.exponential(gap))
        if questions:
            nearest = min(nearest, max(at + 1, at + questions[0][0] - written.length))
        asks = bool(questions) and nearest - at >= questions[0][0] - written.length
        goes_round = not asks and rng.random() * (of_recall + of_loops) < of_loops
        states = not asks and not goes_round and rng.random() < FACT_SHARE
        if asks or states:
            nearest = _paragraph_after(nearest, ends)
        if nearest >= len(document):
            written.append(document[at:], 1)
            return written.ids, written.weights
        written.append(document[at:nearest], 1)
        at = nearest
        if asks:
            _, fact, which = heapq.heappop(questions)
            written.append(*bank.questions[fact][which])
        elif goes_round:
            _go_round(written, rng)
        elif states:
            fact = int(rng.integers(len(bank.statements)))
            for which in range(len(bank.questions[fact])):
                heapq.heappush(questions, (written.length + _log_uniform(rng, FACT_DISTANCE), fact, which))
            written.append(bank.statements[fact], bank.loss.others)
        else:
            _repeat(written, rng, bank.loss)


def _mean_inserted(bank: FactBank) -> float:
    """Tokens that an insertion adds in the end."""
    shortest, longest = PASSAGE_TOKENS
    passage = (longest - shortest) / math.log(longest / shortest)
    return (1.0 - FACT_SHARE) * passage + FACT_SHARE * bank.mean_tokens


def _mean_loop() -> float:
    """Tokens of a loop, about."""
    shortest, longest = LOOP_PERIOD
    return (1 + LOOP_TURNS) / 2 * (longest - shortest) / math.log(longest / shortest) * 0.8


def _paragraph_after(at: int, ends: npt.NDArray[np.int64]) -> int:
    """Where the next paragraph begins; `at` itself where that is far away."""
    index = int(np.searchsorted(ends, at))
    is_near = index < len(ends) and ends[index] - at <= PARAGRAPH_TOKENS
    return int(ends[index]) if is_near else at


def _paragraph_ends(document: Ids, bank: FactBank) -> npt.NDArray[np.int64]:
    """Where a paragraph may begin: after the last of the line breaks between two."""
    is_break = np.isin(document, bank.paragraph_ends)
    return np.flatnonzero(is_break[:-1] & ~is_break[1:]) + 1


def _repeat(written: _Writer, rng: np.random.Generator, loss: RecallLoss) -> None:
    length, distance = _log_uniform(rng, PASSAGE_TOKENS), _log_uniform(rng, PASSAGE_DISTANCE)
    start = written.length - distance
    if start < 1:
        return
    weights = np.ones(min(length, distance), np.uint8)
    weights[: loss.silent] = loss.others
    written.append(written.ids[start : start + len(weights)].copy(), weights)


def _go_round(written: _Writer, rng: np.random.Generator) -> None:
    period = min(_log_uniform(rng, LOOP_PERIOD), written.length - 1)
    if period < LOOP_PERIOD[0]:
        return
    length = period * int(rng.integers(1, LOOP_TURNS + 1))
    if rng.random() < 0.5:  # it ends within a turn
        length -= int(rng.integers(0, period - LOOP_PERIOD[0] + 1))
    turn = written.ids[written.length - period :].copy()
    written.append(np.resize(turn, min(length, LOOP_TOKENS)), 0)


def _one(job: tuple[Ids, float, float, int, int, int]) -> tuple[Ids, Weights]:
    document, share, loops, seed, copy, index = job
    return with_recall(document, share, _BANK[0], np.random.default_rng((seed, copy, index)), loops)


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
    loops: float = 0.0,
    loss: RecallLoss = ANSWERS_ALONE,
) -> TokenizedSplit:
    """Copies of every document of `split`, each with other insertions, in memory: one for each of `shares`.

    `shares` [copies * documents], each in (0, 1): of the first copies of all documents, of the second, and so on.
    `loops`: the share of tokens in loops, of all of them. `loss`: what inserted tokens weigh.
    The bytes and words that the split counts are those of the documents without insertions.
    """
    _BANK[:] = [FactBank.make(tokenizer, split.ids.dtype, seed, num_facts, loss, _texts(split, tokenizer))]
    jobs = []
    for number, share in enumerate(shares):
        copy, index = divmod(number, split.num_documents)
        ids = np.asarray(split.ids[split.offsets[index] : split.offsets[index + 1]])
        jobs.append((ids, float(share), loops, seed, copy, index))
    copies = len(jobs) // split.num_documents
    documents = _run(jobs, workers)
    _BANK.clear()
    offsets = np.cumsum([0, *(len(ids) for ids, _ in documents)], dtype=np.int64)
    return dataclasses.replace(
        split,
        ids=np.concatenate([*(ids for ids, _ in documents), split.ids[-1:]]),
        weights=np.concatenate([*(weights for _, weights in documents), np.ones(1, np.uint8)]),
        offsets=offsets,
        num_bytes=copies * split.num_bytes,
        num_words=copies * split.num_words,
    )


def _texts(split: TokenizedSplit, tokenizer: Tokenizer) -> Iterator[str]:
    """The beginnings of some documents."""
    for start, end in zip(split.offsets[:NAMING_DOCUMENTS], split.offsets[1:], strict=False):
        yield tokenizer.decode(split.ids[start : min(end, start + NAMING_TOKENS)].tolist())


def _run(jobs: Sequence[tuple[Ids, float, float, int, int, int]], workers: int) -> list[tuple[Ids, Weights]]:
    if workers == 1:
        return [_one(job) for job in jobs]
    with multiprocessing.get_context("fork").Pool(workers) as pool:
        return pool.map(_one, jobs, chunksize=8)
