"""Tokenizers of every kind, from a directory or from JSON."""

from __future__ import annotations

from pathlib import Path

from nsm_core.tokenizer import TOKENIZER_FILE, BpeTokenizer, Tokenizer
from nsm_core.world_tokenizer import KIND, WorldTokenizer, find_vocabulary


def load_tokenizer(directory: Path, *, vocab_size: int = 0) -> Tokenizer:
    """`tokenizer.json` in a directory, or else RWKV's vocabulary, beside it or installed.

    `vocab_size`: of the model. Raises CheckpointError, which names missing files.
    """
    if (directory / TOKENIZER_FILE).is_file():
        return BpeTokenizer.load(directory, vocab_size=vocab_size)
    return WorldTokenizer.read(find_vocabulary(directory), vocab_size=vocab_size)


def tokenizer_from_json(text: str) -> Tokenizer:
    """The inverse of `Tokenizer.to_json`. Raises CheckpointError."""
    is_world = text.startswith(f'{{"kind": "{KIND}"')
    return WorldTokenizer.from_json(text) if is_world else BpeTokenizer.from_json(text)
