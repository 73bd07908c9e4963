"""What vectors of states are good for, beside counts of tokens: `python -m benchmarks.embedding_quality --help`.

Two tasks on the last tokens of texts. Nearest: for each passage of 20 books, does the nearest other one come from the
same book? Ratings: are reviews good or bad, by ridge regression on the vectors, in five folds? The counts of tokens are
weighted by how rare a token is (tf-idf).
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import math
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

from service.generate.embeddings import sketch, state_after
from service.local_model import make_local_backend
from service.settings import load_settings

NUM_BOOKS, NUM_PASSAGES, NUM_REVIEWS, NUM_TOKENS, NUM_FOLDS = 20, 10, 240, 96, 5
AT_ONCE = 16
Matrix = NDArray[np.float64]


def rows_of(path: Path) -> Iterator[dict[str, Any]]:
    with path.open("rb") as file:
        yield from map(json.loads, io.TextIOWrapper(zstandard.ZstdDecompressor().stream_reader(file), "utf-8"))


def centred(vectors: Matrix) -> Matrix:
    vectors = vectors - vectors.mean(axis=0)
    length = np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors / np.where(length > 0, length, 1.0)


def nearest_share(vectors: Matrix, labels: list[int]) -> float:
    """Of vectors whose nearest other one has the same label."""
    products = centred(vectors) @ centred(vectors).T
    np.fill_diagonal(products, -np.inf)
    return float((np.array(labels)[products.argmax(axis=1)] == np.array(labels)).mean())


def ridge_share(vectors: Matrix, labels: list[int]) -> float:
    """Of labels 0 and 1 that are right in the fold that was left out."""
    products, signs = centred(vectors) @ centred(vectors).T, np.array(labels) * 2.0 - 1.0
    folds, right = np.arange(len(labels)) % NUM_FOLDS, []
    for fold in range(NUM_FOLDS):
        seen, left = folds != fold, folds == fold
        weights = np.linalg.solve(products[np.ix_(seen, seen)] + 0.3 * np.eye(seen.sum()), signs[seen])
        right.append((np.sign(products[np.ix_(left, seen)] @ weights) == signs[left]).mean())
    return float(np.mean(right))


def counts_of(texts: list[list[int]], vocab_size: int) -> Matrix:
    counts = np.zeros((len(texts), vocab_size))
    for row, ids in zip(counts, texts, strict=True):
        np.add.at(row, ids, 1.0)
    rarity = np.log(len(texts) / (1.0 + (counts > 0).sum(axis=0)))
    return np.log1p(counts) * np.clip(rarity, 0.0, None)


async def vectors_of(backend: Any, texts: list[list[int]], dimensions: int) -> Matrix:
    start_id = backend.tokenizer.end_of_text_id

    async def read(ids: tuple[int, ...], name: str) -> bytes:
        return await state_after(backend, ids, request_id=name, deadline=math.inf)

    start, made = await read((start_id,), "start"), []
    for first in range(0, len(texts), AT_ONCE):
        some = texts[first : first + AT_ONCE]
        states = await asyncio.gather(*(read((start_id, *ids), str(number)) for number, ids in enumerate(some)))
        made += [sketch(backend.model.state_layout, state, start, dimensions) for state in states]
    return np.array(made, dtype=np.float64)


async def measure(books: Path, reviews: Path, model: str | None, dimensions: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as data_dir:
        backend = make_local_backend(load_settings(model=model, data_dir=data_dir))
    draw, tokenizer = random.Random(1), backend.tokenizer
    passages, names = list[list[int]](), list[int]()
    texts = (row["text"] for row in rows_of(books) if len(row["text"]) > 40_000)
    for name, text in zip(range(NUM_BOOKS), texts, strict=False):
        ids = tokenizer.encode(text[5_000:200_000])
        passages += [ids[at : at + NUM_TOKENS] for at in draw.sample(range(len(ids) - NUM_TOKENS), NUM_PASSAGES)]
        names += [name] * NUM_PASSAGES
    rated = list(rows_of(reviews))
    draw.shuffle(rated)
    ends = [tokenizer.encode(row["text"])[-NUM_TOKENS:] for row in rated[:NUM_REVIEWS]]
    labels = [int(row["label"]) for row in rated[:NUM_REVIEWS]]
    await backend.start()
    try:
        of_states = [await vectors_of(backend, given, dimensions) for given in (passages, ends)]
    finally:
        await backend.stop()
    of_counts = [counts_of(given, tokenizer.vocab_size) for given in (passages, ends)]
    return {
        "model": backend.model.name,
        "numerics": backend.model.numerics,
        "dimensions": dimensions,
        "same book, states": nearest_share(of_states[0], names),
        "same book, tf-idf": nearest_share(of_counts[0], names),
        "same book, chance": (NUM_PASSAGES - 1) / (NUM_BOOKS * NUM_PASSAGES - 1),
        "ratings, states": ridge_share(of_states[1], labels),
        "ratings, tf-idf": ridge_share(of_counts[1], labels),
        "ratings, chance": max(sum(labels), NUM_REVIEWS - sum(labels)) / NUM_REVIEWS,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--books", type=Path, required=True, help="a .jsonl.zst of texts")
    parser.add_argument("--reviews", type=Path, required=True, help="a .jsonl.zst of texts with label 0 or 1")
    parser.add_argument("--model", help="as for nsm serve")
    parser.add_argument("--dimensions", type=int, default=1024)
    given = parser.parse_args()
    print(json.dumps(asyncio.run(measure(given.books, given.reviews, given.model, given.dimensions))))


if __name__ == "__main__":
    main()
