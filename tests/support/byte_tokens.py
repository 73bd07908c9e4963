"""A tokenizer whose tokens are given, so that a test decides where tokens cut a text."""

from __future__ import annotations

from collections.abc import Sequence

import tokenizers
from tokenizers import models, pre_tokenizers

from nsm_core.tokenizer import END_OF_TEXT, BpeTokenizer, Tokenizer

END_ID = 0
FIRST_PIECE_ID = 257


def byte_id(byte: int) -> int:
    """The id of the token that is one byte."""
    return byte + 1


def tokenizer_of(pieces: Sequence[bytes] = ()) -> Tokenizer:
    """End of text, the 256 bytes, then piece i as token FIRST_PIECE_ID + i. There are no merges: text becomes bytes."""
    tokens = [END_OF_TEXT, *(_char_of(byte) for byte in range(256))]
    tokens += ["".join(_char_of(byte) for byte in piece) for piece in pieces]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    inner.add_special_tokens([END_OF_TEXT])
    return BpeTokenizer(inner)


def _char_of(byte: int) -> str:
    """The byte-level BPE alphabet: bytes that print stand for themselves, the n-th of the others for U+0100 + n."""
    others = [*range(0x21), *range(0x7F, 0xA1), 0xAD]
    return chr(0x100 + others.index(byte)) if byte in others else chr(byte)
