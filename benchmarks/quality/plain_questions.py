"""Numbers and names that a text tells once, in ordinary sentences, and what a model answers to ordinary questions:
`python -m benchmarks.quality.plain_questions`.

Twelve ways to tell and ask, none of them in the sentences of training, four texts of each, or `--texts`. Between the
two lie 600 tokens of a book of data/books-sample, or the numbers of `--between`; texts of more than 5,000 tokens
need the books of `--data`. An answer is right if it begins with what was told, and right to the end if no further
letter or digit follows.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.quality.loops import BOOKS
from nsm_core.config import EngineConfig
from nsm_core.engine.engine import Engine
from nsm_core.engine.request import Finished, GenerationRequest, PromptState, Resume
from nsm_core.execution.native.executor import NativeExecutor
from nsm_core.model.bundled import CHECKPOINTS
from nsm_core.model.loader import LoadedNsm, load_checkpoint
from nsm_core.sampling.params import SamplingParams
from nsm_lab.training.data_files import read_documents

NUMBERS = (
    ("Old Mrs. Brandreth left {} pounds to the hospital.", "How much did Mrs. Brandreth leave to it? She left"),
    ("There are {} steps up to the lighthouse.", "How many steps lead up to the lighthouse? There are"),
    ("To reach the surgery one asks for {}.", "What number belongs to the surgery? Its number is"),
    ("The safe opens with {}, but nobody knows it.", "With which number does the safe open? It opens with"),
    ("We counted {} gulls upon the rock.", "How many gulls had we counted? We had counted"),
    ("Policeman {} found the child.", "Which policeman found the child? It was policeman"),
)
NAMED = (
    ("The new schoolmaster is called {}, a quiet man.", "What was the schoolmaster's name? His name was"),
    ("Our ship, the {}, lay off the harbour.", "What was the name of our ship? Our ship was the"),
    ("Take the road to {}, said the shepherd.", "Which road did the shepherd mean? The road to"),
    ("My dog {} barks at strangers.", "What is my dog's name? My dog's name is"),
    ("User: Good day, my name is {}.\n\nAssistant: Good day.", "User: What is my name?\n\nAssistant: Your name is"),
    ("Miss Ferrars was married to {} in the spring.", "Whom had Miss Ferrars married? She had married"),
)
NAMES = ("Wetherby", "Corisande", "Tolliver", "Maplethorpe", "Ravenna", "Sebastian", "Quimper", "Isolde")
TEXTS, BEFORE, BETWEEN, ANSWER_TOKENS = 4, 100, 600, 8  # texts; tokens
AT_ONCE = 8  # texts, whose states are in memory until they are asked


@dataclasses.dataclass(frozen=True, slots=True)
class FactText:
    """`ids`: a text's tokens, in which `value` is told; `end`: of them up to and with the telling."""

    question: str
    value: str
    ids: tuple[int, ...]
    end: int


def fact_texts(loaded: LoadedNsm, book: Sequence[int], count: int, longest: int) -> Iterator[FactText]:
    """`count` of each way, with `longest` tokens of `book` after the telling."""
    encode, rng = loaded.tokenizer.encode, random.Random(0)
    for statement, question in NUMBERS + NAMED:
        for start in range(0, count * BETWEEN, BETWEEN):
            is_number = (statement, question) in NUMBERS
            value = str(rng.randrange(100, 99_999)) if is_number else rng.choice(NAMES)
            middle = start + BEFORE
            telling = encode(f"\n\n{statement.format(value)}\n\n")
            text = [loaded.tokenizer.end_of_text_id, *book[start:middle], *telling]
            if len(book) < middle + longest:
                raise SystemExit(f"the book has {len(book):,} tokens, {middle + longest:,} are needed: see --data")
            yield FactText(question, value, (*text, *book[middle : middle + longest]), len(text))


def answers(
    loaded: LoadedNsm, texts: Sequence[FactText], distances: Sequence[int], threads: int = 1
) -> Iterator[tuple[FactText, int, str]]:
    """(text, distance, answer), as they come. A text is read once; questions continue its states at the distances."""
    executor = functools.partial(NativeExecutor, num_threads=threads)
    config = EngineConfig(max_slots=32)
    engine = Engine(loaded.model, loaded.tokenizer, fingerprint="", config=config, executor=executor)
    for first in range(0, len(texts), AT_ONCE):
        for number in range(first, min(first + AT_ONCE, len(texts))):
            positions = tuple(texts[number].end + distance for distance in sorted(distances))
            engine.add(
                GenerationRequest(
                    request_id=str(number),
                    prompt_ids=texts[number].ids,
                    sampling=SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True),
                    keep_states_at=positions,
                )
            )
        while engine.has_work:
            for name, event in engine.step():
                if isinstance(event, PromptState):
                    text = texts[int(name)]
                    engine.add(_question(loaded, text, f"{name}:{event.position - text.end}", event))
                elif isinstance(event, Finished) and event.end_state is not None:
                    number, distance = map(int, name.split(":"))
                    yield texts[number], distance, loaded.tokenizer.decode(event.end_state.new_ids[-ANSWER_TOKENS:])


def _question(loaded: LoadedNsm, text: FactText, name: str, at: PromptState) -> GenerationRequest:
    return GenerationRequest(
        request_id=name,
        prompt_ids=tuple(loaded.tokenizer.encode(f"\n\n{text.question}")),
        sampling=SamplingParams(max_tokens=ANSWER_TOKENS, temperature=0.0, ignore_eos=True),
        resume=Resume(state=at.state, position=at.position, fingerprint="", generated_counts={}),
        keep_state=True,
    )


def is_right(value: str, answer: str) -> tuple[bool, bool]:
    """Whether `answer` begins with `value`, and whether it ends there."""
    said = answer.strip()
    begins = said.startswith(value)
    return begins, begins and not said[len(value) : len(value) + 1].isalnum()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="pulse-books-keyed", help="of the bundled ones")
    parser.add_argument("--data", type=Path, default=BOOKS, help="corpus, for the first book of its validation split")
    parser.add_argument("--texts", type=int, default=TEXTS, help="of each way")
    parser.add_argument("--between", type=int, nargs="+", default=[BETWEEN], help="tokens")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--show", action="store_true", help="every answer")
    options = parser.parse_args()
    loaded = load_checkpoint(CHECKPOINTS / options.model)
    book = loaded.tokenizer.encode(next(iter(read_documents(options.data, "val"))).text)
    texts = list(fact_texts(loaded, book, options.texts, max(options.between)))
    of_way = dict[tuple[str, int], list[tuple[bool, bool]]]()
    for text, distance, answer in answers(loaded, texts, options.between, options.threads):
        of_way.setdefault((text.question, distance), []).append(is_right(text.value, answer))
        if options.show:
            print(f"{text.question} [{text.value}] {distance:,} tokens later: {answer!r}", flush=True)
    heads = [f"{distance:,} tokens later: right | to the end" for distance in options.between]
    print(f"| asked | {' | '.join(heads)} |\n| --- |{' ---: | ---: |' * len(heads)}")
    ways = [question for _, question in NUMBERS + NAMED]
    for question in ways:
        cells = [_counts(of_way[question, distance]) for distance in options.between]
        print(f"| {question.replace(chr(10), ' ')} | {' | '.join(cells)} |")
    totals = [_counts([one for way in ways for one in of_way[way, distance]]) for distance in options.between]
    print(f"| all | {' | '.join(totals)} |")


def _counts(results: Sequence[tuple[bool, bool]]) -> str:
    begins, ends = (sum(result[part] for result in results) for part in (0, 1))
    return f"{begins} of {len(results)} | {ends}"


if __name__ == "__main__":
    main()
