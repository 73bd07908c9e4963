"""A small vocabulary in the form of RWKV's World vocabulary: all bytes, and pieces that overlap."""

from __future__ import annotations

import functools
import itertools
import random

from nsm_core.world_tokenizer import WorldTokenizer

WORDS = (
    "the",
    " the",
    " them",
    "theme",
    "User",
    ": ",
    "\n\n",
    "Assistant:",
    "é",
    "ÿþ",
    "日本",
    "日本語",
    "ing ",
    " " * 8,
)


@functools.cache
def world_tokens(num_pieces: int = 300, seed: int = 7) -> dict[int, bytes]:
    """Bytes by id, from 1 on: the 256 bytes, then pieces of up to 12 bytes that begin alike."""
    draw = random.Random(seed)
    pieces = {word.encode() for word in WORDS}
    while len(pieces) < num_pieces:
        pieces.add(bytes(draw.choices(b"abcd \n\xc3\xa9\xe6\x97", k=draw.randint(2, 12))))
    singles = (bytes([byte]) for byte in range(256))
    return dict(enumerate(itertools.chain(singles, sorted(pieces)), start=1))


def world_tokenizer(vocab_size: int = 0) -> WorldTokenizer:
    return WorldTokenizer(world_tokens(), vocab_size=vocab_size)
