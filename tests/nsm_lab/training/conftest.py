"""A small corpus in the corpus format."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import zstandard

WriteCorpus = Callable[[str, Sequence[str]], Path]

_WORDS = (
    "the",
    "old",
    "sea",
    "kept",
    "its",
    "slow",
    "counsel",
    "while",
    "ships",
    "came",
    "home",
    "under",
    "grey",
    "sky",
)


def make_texts(num_documents: int, *, max_words: int, seed: int = 0) -> list[str]:
    draw = random.Random(seed)
    return [" ".join(draw.choices(_WORDS, k=draw.randint(0, max_words))) for _ in range(num_documents)]


@pytest.fixture
def write_corpus(tmp_path: Path) -> WriteCorpus:
    """Writes texts as one compressed shard of tmp_path/corpus and returns that directory."""

    def write(name: str, texts: Sequence[str]) -> Path:
        directory = tmp_path / "corpus"
        directory.mkdir(exist_ok=True)
        lines = (
            json.dumps({"id": f"d{i}", "title": f"T{i}", "text": t}, ensure_ascii=False) for i, t in enumerate(texts)
        )
        (directory / name).write_bytes(zstandard.compress("".join(f"{line}\n" for line in lines).encode("utf-8")))
        return directory

    return write
