"""Numbers and names that a text tells once, in ordinary sentences, and what a model answers to ordinary questions:
`python -m benchmarks.quality.plain_questions`.

Twelve ways to tell and ask, none of them in the sentences of training, four texts of each. Between telling and asking
lie 600 tokens of a book of data/books-sample, or `--between`, at most 5,000. An answer is right if it begins with what
was told, and right to the end if no further letter or digit follows.
"""

from __future__ import annotations

import argparse
import random

from benchmarks.quality.loops import BOOKS
from nsm_core.config import EngineConfig
from nsm_core.engine.engine import Engine
from nsm_core.engine.request import Finished, GenerationRequest
from nsm_core.execution.native.executor import NativeExecutor
from nsm_core.model.bundled import CHECKPOINTS
from nsm_core.model.loader import load_checkpoint
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


def answers(model: str, between: int = BETWEEN) -> list[tuple[str, str, str]]:
    """(question, told value, answer) of each text. The text tells the value `between` tokens before the question."""
    loaded = load_checkpoint(CHECKPOINTS / model)
    engine = Engine(
        loaded.model, loaded.tokenizer, fingerprint="", config=EngineConfig(max_slots=32), executor=NativeExecutor
    )
    encode, rng = loaded.tokenizer.encode, random.Random(0)
    book = encode(next(iter(read_documents(BOOKS, "val"))).text)
    asked = list[tuple[str, str]]()
    for statement, question in NUMBERS + NAMED:
        for start in range(0, TEXTS * BETWEEN, BETWEEN):
            is_number = (statement, question) in NUMBERS
            value = str(rng.randrange(100, 99_999)) if is_number else rng.choice(NAMES)
            middle = start + BEFORE
            prompt = [
                loaded.tokenizer.end_of_text_id,
                *book[start:middle],
                *encode(f"\n\n{statement.format(value)}\n\n"),
                *book[middle : middle + between],
                *encode(f"\n\n{question}"),
            ]
            sampling = SamplingParams(max_tokens=ANSWER_TOKENS, temperature=0.0, ignore_eos=True)
            number = str(len(asked))
            engine.add(
                GenerationRequest(request_id=number, prompt_ids=tuple(prompt), sampling=sampling, keep_state=True)
            )
            asked.append((question, value))
    found = dict[str, str]()
    while engine.has_work:
        for number, event in engine.step():
            if isinstance(event, Finished) and event.end_state is not None:
                found[number] = loaded.tokenizer.decode(event.end_state.new_ids[-ANSWER_TOKENS:])
    return [(question, value, found[str(number)]) for number, (question, value) in enumerate(asked)]


def is_right(value: str, answer: str) -> tuple[bool, bool]:
    """Whether `answer` begins with `value`, and whether it ends there."""
    said = answer.strip()
    begins = said.startswith(value)
    return begins, begins and not said[len(value) : len(value) + 1].isalnum()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="pulse-books-keyed", help="of the bundled ones")
    parser.add_argument("--between", type=int, default=BETWEEN, help="tokens")
    parser.add_argument("--show", action="store_true", help="every answer")
    options = parser.parse_args()
    print("| asked | right | right to the end |\n| --- | ---: | ---: |")
    of_way = dict[str, list[tuple[bool, bool]]]()
    for question, value, answer in answers(options.model, options.between):
        of_way.setdefault(question, []).append(is_right(value, answer))
        if options.show:
            print(f"{question} [{value}] {answer!r}")
    for question, results in of_way.items():
        begins, ends = (sum(result[part] for result in results) for part in (0, 1))
        print(f"| {question.replace(chr(10), ' ')} | {begins} of {len(results)} | {ends} of {len(results)} |")


if __name__ == "__main__":
    main()
