"""Numbers that a text tells in several ways, and whether the default model writes them when it is asked:
`python -m benchmarks.quality.written_numbers --data books`. A line for each way.

Of each way eight texts of one validation book, with 1,000 tokens of the book between telling and asking.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from pathlib import Path

import torch

from nsm_core.model.bundled import CHECKPOINTS
from nsm_core.model.loader import LoadedNsm, load_checkpoint
from nsm_lab.training.data_files import read_documents

WAYS = (
    ("The pass key is {key}. Remember it. {key} is the pass key.", "What is the pass key? The pass key is"),
    ("Anna put the parcel into locker {key} and went home.", "Anna came back for her parcel. She opened locker"),
    (
        "The convoy sails with {key} barrels of oil, wrote the admiral.",
        "The admiral was asked how many barrels of oil the convoy had. He replied that there were",
    ),
    ("Ticket {key} won the motor-car.", "The ticket that won the motor-car had the number"),
)
TEXTS, BEFORE, BETWEEN, STRIDE = 8, 200, 1000, 700  # tokens, but for the first


@torch.no_grad()
def ranks(loaded: LoadedNsm, text: Sequence[int], answer: Sequence[int]) -> list[int]:
    """Of each token of `answer` among all, from 1, with the right ones before it given."""
    hidden, state = loaded.model.forward(torch.tensor([text]), loaded.model.initial_state(1))
    last, found = hidden[:, -1], []
    for token in answer:
        logits = loaded.model.logits(last)[0]
        found.append(int((logits > logits[token]).sum()) + 1)
        last, state = loaded.model.step(torch.tensor([token]), state)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", default="pulse-books-keyed")
    options = parser.parse_args()
    loaded = load_checkpoint(CHECKPOINTS / options.model, "cpu")
    encode = loaded.tokenizer.encode
    book = encode(next(iter(read_documents(options.data, "val"))).text[:60_000])
    rng = random.Random(0)
    for statement, question in WAYS:
        of_texts = []
        for start in range(0, TEXTS * STRIDE, STRIDE):
            key, border = str(rng.randrange(10_000, 99_999)), start + BEFORE
            text = [
                loaded.tokenizer.end_of_text_id,
                *book[start:border],
                *encode(f"\n\n{statement.format(key=key)}\n\n"),
            ]
            text += [*book[border : border + BETWEEN], *encode(f"\n\n{question}")]
            of_texts.append(ranks(loaded, text, encode(f" {key}")))
        written = sum(set(found) == {1} for found in of_texts)
        firsts = ", ".join(str(found[0]) for found in of_texts)
        print(f"{question}: written {written} of {TEXTS}; ranks of the first token {firsts}", flush=True)


if __name__ == "__main__":
    main()
