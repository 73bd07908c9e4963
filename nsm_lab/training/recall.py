"""Texts whose earlier parts are needed again: passages that return, facts that are asked for later.

Books rarely repeat themselves word by word, so a model that is trained on them alone has little reason to keep what has
left its attention windows. Here passages of a document return later in it, and invented facts are stated and asked for.
Distances are even on a log scale, and half of the passages return from farther: a state of thousands of tokens is what
is hardest to learn.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
import multiprocessing
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from nsm_core.tokenizer import Tokenizer
from nsm_lab.training.data import TokenizedSplit, document_order
from nsm_lab.training.facts import Asked, make_fact
from nsm_lab.training.passing import Mention, Vocabulary, make_mention
from nsm_lab.training.phrasings import things_in

PASSAGE_TOKENS = (24, 320)  # shortest and longest passage that returns
PASSAGE_DISTANCE = (640, 40_960)  # tokens from its beginning to its return
FAR_DISTANCE, FAR_SHARE = (6_000, 32_000), 0.5  # of so many of them
PASSAGE_SHARE = 0.4  # of all insertions, by their number; the others are facts, with their questions
UNPREDICTABLE_TOKENS = 8  # of a passage that returns, the first: nothing says that it will
FACT_DISTANCE = (192, 49_152)  # tokens from a statement to a question
NEAR_DISTANCE, NEAR_SHARE = (4, 192), 0.25  # of so many questions
PASSING_SHARE = 0.55  # of the facts, those that are told in passing
PARAGRAPH_TOKENS = 400  # farthest that a fact waits for the end of a paragraph
NAMING_DOCUMENTS, NAMING_TOKENS = 400, 50_000  # from which facts take the names of things
NUM_FACTS = 32_768  # made for a run
ANSWER_WEIGHT = 3  # of a token that a question asks for, in the loss
AFTER_WEIGHT = 5  # of the token after an answer
LOOP_PERIOD = (1, 320)  # tokens that are said again at once
LOOP_TURNS = 3  # how often at most, or more often if the loop is short:
SHORT_LOOP = 64  # tokens
LOOP_TOKENS = 400  # longest loop

Ids = npt.NDArray[np.unsignedinteger]
Weights = npt.NDArray[np.uint8]  # of tokens, in the loss; 0: read, but not to be said


@dataclasses.dataclass(frozen=True, slots=True)
class RecallLoss:
    """How much tokens of what is inserted weigh in the loss; a token of the document weighs 1.

    `first_answer`: the first token of an answer, `answer` its others, `others` statements, the rest of a question, and
    the first tokens of a passage, `silent` in number; `passage` its later ones. `after`: the token after an answer,
    which says where it ends.
    """

    answer: int = ANSWER_WEIGHT
    first_answer: int = ANSWER_WEIGHT
    others: int = 0
    after: int = AFTER_WEIGHT
    silent: int = UNPREDICTABLE_TOKENS
    passage: int = 1


ANSWERS_ALONE = RecallLoss()
ALL_WORDS = RecallLoss(answer=1, first_answer=1, others=1, after=1)


@dataclasses.dataclass(frozen=True, slots=True)
class RecallMix:
    """What is inserted. `passages`: of all insertions the share of passages that return, by their number, of which the
    share `far` is from FAR_DISTANCE; the other insertions are facts, and a fact's questions belong to its statement.
    """

    passages: float = PASSAGE_SHARE
    far: float = FAR_SHARE


USUAL_MIX = RecallMix()


@dataclasses.dataclass(frozen=True, slots=True)
class FactBank:
    """Token ids of statements and of their questions, each with the weights of its tokens by `loss`.

    `is_inline`: a fact's texts are sentences within a paragraph. Sets of ids: after `paragraph_ends` a paragraph may
    begin; between one of `sentence_ends` and one of `sentence_starts` a sentence.
    """

    statements: tuple[tuple[Ids, Weights], ...]
    questions: tuple[tuple[tuple[Ids, Weights], ...], ...]
    is_inline: tuple[bool, ...]
    paragraph_ends: Ids
    sentence_ends: Ids
    sentence_starts: Ids
    loss: RecallLoss = ANSWERS_ALONE

    @property
    def mean_tokens(self) -> float:
        """Of a fact with all its questions."""
        asked = sum(len(ids) for questions in self.questions for ids, _ in questions)
        return (sum(len(ids) for ids, _ in self.statements) + asked) / len(self.statements)

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
        read = tuple(texts)
        mentions = tuple(_facts(random.Random(seed), num_facts, read, seed))
        encoded = iter(
            _encoded(tokenizer, [text for fact in mentions for text in (fact.statement, *fact.questions)], dtype, loss)
        )
        statements, questions = list[tuple[Ids, Weights]](), list[tuple[tuple[Ids, Weights], ...]]()
        for fact in mentions:
            statements.append(next(encoded))
            questions.append(tuple(next(encoded) for _ in fact.questions))
        ends = [ids[-1] for (ids, _), fact in zip(statements, mentions, strict=True) if not fact.is_inline]
        spoken = [tokenizer.decode([number]) for number in range(tokenizer.vocab_size)]
        return cls(
            tuple(statements),
            tuple(questions),
            tuple(fact.is_inline for fact in mentions),
            np.unique(ends).astype(dtype),
            _numbers(spoken, dtype, lambda text: text.rstrip("\"'").endswith((".", "!", "?"))),
            _numbers(spoken, dtype, lambda text: text[:1] == " " and (text[1:2].isupper() or text == ' "')),
            loss,
        )


def _numbers(spoken: Sequence[str], dtype: np.dtype[np.unsignedinteger], is_one: Callable[[str], bool]) -> Ids:
    return np.array([number for number, text in enumerate(spoken) if is_one(text)], dtype)


def _facts(rng: random.Random, count: int, texts: Sequence[str], seed: int) -> Iterator[Mention]:
    """Some told in passing, the others by name."""
    things, words = things_in(texts, random.Random(seed)), Vocabulary.of(texts)
    for _ in range(count):
        if rng.random() < PASSING_SHARE:
            yield make_mention(rng, words)
        else:
            fact = make_fact(rng, things)
            yield Mention(Asked(fact.statement, ()), fact.questions, is_inline=False)


def _encoded(
    tokenizer: Tokenizer, questions: Sequence[Asked], dtype: np.dtype[np.unsignedinteger], loss: RecallLoss
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
            last = max(first + 1, last)
            weights[last : last + 1] = loss.after
            weights[first:last] = loss.answer
            weights[first] = loss.first_answer
        made.append((np.array(ids, dtype), weights))
    return made


def _shared(ids: Sequence[int], others: Sequence[int]) -> int:
    """Tokens that both begin with."""
    pairs = enumerate(zip(ids, others, strict=False))
    return next((at for at, (one, other) in pairs if one != other), min(len(ids), len(others)))


class Written(NamedTuple):
    """A document with what was inserted. `turns`: of tokens that a loop says again, how far back its first turn has
    them; else 0.
    """

    ids: Ids
    weights: Weights
    turns: npt.NDArray[np.uint16]


def _log_uniform(rng: np.random.Generator, bounds: tuple[int, int]) -> int:
    return int(np.exp(rng.uniform(*np.log(bounds))))


class _Writer:
    """A document that grows: read in any place, written at its end."""

    def __init__(self, capacity: int, dtype: np.dtype[np.unsignedinteger]) -> None:
        self._ids, self._weights = np.empty(capacity, dtype), np.empty(capacity, np.uint8)
        self._turns = np.empty(capacity, np.uint16)
        self.length = 0

    @property
    def ids(self) -> Ids:
        return self._ids[: self.length]

    @property
    def weights(self) -> Weights:
        return self._weights[: self.length]

    @property
    def turns(self) -> npt.NDArray[np.uint16]:
        return self._turns[: self.length]

    def append(self, ids: Ids, weights: Weights | int, turns: npt.NDArray[np.integer] | int = 0) -> None:
        end = self.length + len(ids)
        if end > len(self._ids):
            more = max(len(self._ids), len(ids))
            self._ids, self._weights, self._turns = (
                np.concatenate((held, np.empty(more, held.dtype))) for held in (self._ids, self._weights, self._turns)
            )
        self._ids[self.length : end], self._weights[self.length : end] = ids, weights
        self._turns[self.length : end] = turns
        self.length = end


def with_recall(
    document: Ids,
    share: float,
    bank: FactBank,
    rng: np.random.Generator,
    loops: float = 0.0,
    mix: RecallMix = USUAL_MIX,
) -> Written:
    """`document` begins with the end-of-text token; about `share` of the result's tokens are inserted to be recalled.

    About `loops` of them stand in loops: what was said just before is said again, up to LOOP_TURNS times, and then the
    text goes on. Tokens of a loop have no weight, and `turns` says where their first turn is.
    """
    written = _Writer(int(len(document) / (1.0 - share - loops) * 1.2) + 1024, document.dtype)
    of_recall, of_loops = share / _mean_inserted(bank, mix), loops / _mean_loop()  # insertions a token of the result
    gap = (1.0 - share - loops) / (of_recall + of_loops)
    ends, sentences = _paragraph_ends(document, bank), _sentence_ends(document, bank)
    questions: list[tuple[int, int, int]] = []  # where it is due, which fact, which of its questions
    at = 0
    while True:
        nearest = at + 1 + int(rng.exponential(gap))
        if questions:
            nearest = min(nearest, max(at + 1, at + questions[0][0] - written.length))
        asks = bool(questions) and nearest - at >= questions[0][0] - written.length
        goes_round = not asks and rng.random() * (of_recall + of_loops) < of_loops
        states = not asks and not goes_round and rng.random() < 1.0 - mix.passages
        fact = questions[0][1] if asks else int(rng.integers(len(bank.statements)))
        if asks or states:
            nearest = _next_start(nearest, sentences if bank.is_inline[fact] else ends)
        if nearest >= len(document):
            written.append(document[at:], 1)
            return Written(written.ids, written.weights, written.turns)
        written.append(document[at:nearest], 1)
        at = nearest
        if asks:
            _, fact, which = heapq.heappop(questions)
            written.append(*bank.questions[fact][which])
        elif goes_round:
            _go_round(written, rng)
        elif states:
            written.append(*bank.statements[fact])
            for which in range(len(bank.questions[fact])):
                heapq.heappush(questions, (written.length + _fact_distance(rng), fact, which))
        else:
            _repeat(written, rng, bank.loss, mix.far)


def _fact_distance(rng: np.random.Generator) -> int:
    return _log_uniform(rng, NEAR_DISTANCE if rng.random() < NEAR_SHARE else FACT_DISTANCE)


def _mean_inserted(bank: FactBank, mix: RecallMix) -> float:
    """Tokens that an insertion adds in the end."""
    shortest, longest = PASSAGE_TOKENS
    passage = (longest - shortest) / math.log(longest / shortest)
    return mix.passages * passage + (1.0 - mix.passages) * bank.mean_tokens


def _mean_loop() -> float:
    """Tokens of a loop, about."""
    shortest, longest = LOOP_PERIOD
    return (1 + LOOP_TURNS) / 2 * (longest - shortest) / math.log(longest / shortest) * 0.8


def _next_start(at: int, starts: npt.NDArray[np.int64]) -> int:
    """Where the next sentence or paragraph begins; `at` itself where that is far away."""
    index = int(np.searchsorted(starts, at))
    is_near = index < len(starts) and starts[index] - at <= PARAGRAPH_TOKENS
    return int(starts[index]) if is_near else at


def _sentence_ends(document: Ids, bank: FactBank) -> npt.NDArray[np.int64]:
    """Where a sentence may begin within a paragraph."""
    is_end = np.isin(document[:-1], bank.sentence_ends) & np.isin(document[1:], bank.sentence_starts)
    return np.flatnonzero(is_end) + 1


def _paragraph_ends(document: Ids, bank: FactBank) -> npt.NDArray[np.int64]:
    """Where a paragraph may begin: after the last of the line breaks between two."""
    is_break = np.isin(document, bank.paragraph_ends)
    return np.flatnonzero(is_break[:-1] & ~is_break[1:]) + 1


def _repeat(written: _Writer, rng: np.random.Generator, loss: RecallLoss, far_share: float) -> None:
    is_far = rng.random() < far_share
    length, distance = (
        _log_uniform(rng, PASSAGE_TOKENS),
        _log_uniform(rng, FAR_DISTANCE if is_far else PASSAGE_DISTANCE),
    )
    start = written.length - distance
    if start < 1:
        return
    weights = np.full(min(length, distance), loss.passage, np.uint8)
    weights[: loss.silent] = loss.others
    written.append(written.ids[start : start + len(weights)].copy(), weights)


def _go_round(written: _Writer, rng: np.random.Generator) -> None:
    period = min(_log_uniform(rng, LOOP_PERIOD), written.length - 1)
    if period < LOOP_PERIOD[0]:
        return
    turns = int(rng.integers(1, max(LOOP_TURNS, SHORT_LOOP // period) + 1))
    length = period * turns
    if rng.random() < 0.5:  # it ends within a turn
        length -= int(rng.integers(0, period))
    length = min(length, LOOP_TOKENS)
    turn = written.ids[written.length - period :].copy()
    written.append(np.resize(turn, length), 0, (np.arange(length) // period + 1) * period)


@dataclasses.dataclass(frozen=True, slots=True)
class _Job:
    """A document to be written; `seeds` are those of its own random numbers."""

    document: Ids
    share: float
    loops: float
    mix: RecallMix
    seeds: tuple[int, int, int]


def _one(job: _Job) -> Written:
    return with_recall(job.document, job.share, _BANK[0], np.random.default_rng(job.seeds), job.loops, job.mix)


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
    mix: RecallMix = USUAL_MIX,
) -> TokenizedSplit:
    """Copies of every document of `split`, each with other insertions, in memory: one for each of `shares`.

    `shares` [copies * documents], each in (0, 1): of the first copies of all documents, of the second, and so on.
    `loops`: the share of tokens in loops, of all of them. `loss`: what inserted tokens weigh; `mix`: what is inserted.
    The bytes and words that the split counts are those of the documents without insertions.
    """
    _BANK[:] = [FactBank.make(tokenizer, split.ids.dtype, seed, num_facts, loss, _texts(split, tokenizer))]
    jobs = []
    for number, share in enumerate(shares):
        copy, index = divmod(number, split.num_documents)
        ids = np.asarray(split.ids[split.offsets[index] : split.offsets[index + 1]])
        jobs.append(_Job(ids, float(share), loops, mix, (seed, copy, index)))
    copies = len(jobs) // split.num_documents
    documents = _run(jobs, workers)
    _BANK.clear()
    offsets = np.cumsum([0, *(len(document.ids) for document in documents)], dtype=np.int64)
    return dataclasses.replace(
        split,
        ids=np.concatenate([*(document.ids for document in documents), split.ids[-1:]]),
        weights=np.concatenate([*(document.weights for document in documents), np.ones(1, np.uint8)]),
        turns=np.concatenate([*(document.turns for document in documents), np.zeros(1, np.uint16)]),
        offsets=offsets,
        num_bytes=copies * split.num_bytes,
        num_words=copies * split.num_words,
    )


def _texts(split: TokenizedSplit, tokenizer: Tokenizer) -> Iterator[str]:
    """The beginnings of some documents."""
    for start, end in zip(split.offsets[:NAMING_DOCUMENTS], split.offsets[1:], strict=False):
        yield tokenizer.decode(split.ids[start : min(end, start + NAMING_TOKENS)].tolist())


def _run(jobs: Sequence[_Job], workers: int) -> list[Written]:
    if workers == 1:
        return [_one(job) for job in jobs]
    with multiprocessing.get_context("fork").Pool(workers) as pool:
        return pool.map(_one, jobs, chunksize=8)
