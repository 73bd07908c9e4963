"""The tokenizer of an RWKV-7 model: inside of a GGUF file, or beside the weights, or of an installed package."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from nsm_core.errors import CheckpointError
from nsm_core.formats.gguf_file import Gguf
from nsm_core.rwkv7.finding import Found
from nsm_core.tokenizer import END_OF_TEXT, BpeTokenizer, Tokenizer
from nsm_core.tokenizer_files import load_tokenizer
from nsm_core.world_tokenizer import WorldTokenizer, tokens_of_literals

_NORMAL = 1  # llama.cpp's kind of a token that stands for text


def find_tokenizer(found: Found, vocab_size: int) -> Tokenizer:
    """Raises CheckpointError, which names missing parts and those that do not fit."""
    kind = None if found.gguf is None else found.gguf.text("tokenizer.ggml.model")
    if found.gguf is None or kind is None:
        return load_tokenizer(found.directory, vocab_size=vocab_size)
    tokens = found.gguf.keys.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list):
        raise CheckpointError(f"{found.path}: tokenizer.ggml.tokens is missing")
    if len(tokens) > vocab_size:
        raise CheckpointError(
            f"{found.path}: the vocabulary has {len(tokens)} tokens, the model's embedding {vocab_size}"
        )
    try:
        if kind == "rwkv":
            return WorldTokenizer(_world_tokens(found.gguf, tokens), vocab_size=vocab_size)
        if kind == "gpt2":
            return _bpe(found.gguf, tokens, vocab_size)
    except CheckpointError as error:
        raise CheckpointError(f"{found.path}: {error}") from error
    raise CheckpointError(f"{found.path}: the vocabulary is of the kind {kind[:40]!r}; read are 'rwkv' and 'gpt2'")


def _world_tokens(gguf: Gguf, literals: list[bytes]) -> dict[int, bytes]:
    kinds = gguf.keys.get("tokenizer.ggml.token_type")
    if not isinstance(kinds, np.ndarray) or len(kinds) != len(literals):
        raise CheckpointError("tokenizer.ggml.token_type does not fit the tokens")
    tokens = tokens_of_literals(literals)
    return {token_id: raw for token_id, raw in tokens.items() if kinds[token_id] == _NORMAL}


def _bpe(gguf: Gguf, tokens: list[bytes], vocab_size: int) -> BpeTokenizer:
    """GPT-2's form: tokens in the byte-level alphabet, and merges; the token that ends a text has a name of its own."""
    merges = gguf.keys.get("tokenizer.ggml.merges")
    end_id = gguf.whole("tokenizer.ggml.eos_token_id")
    if not isinstance(merges, list) or end_id is None or not 0 <= end_id < len(tokens):
        raise CheckpointError("tokenizer.ggml.merges or tokenizer.ggml.eos_token_id is missing")
    if gguf.text("tokenizer.ggml.pre") not in (None, "default", "gpt-2"):
        raise CheckpointError("tokenizer.ggml.pre is not 'gpt-2', the one way to cut text that is read")
    names = [token.decode("utf-8", "replace") for token in tokens]
    names[end_id] = END_OF_TEXT
    return BpeTokenizer.from_json(
        json.dumps(_bpe_file({name: index for index, name in enumerate(names)}, merges)), vocab_size=vocab_size
    )


def _bpe_file(vocab: dict[str, int], merges: list[bytes]) -> dict[str, Any]:
    """As a `tokenizer.json` has it."""
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    special = {
        "id": vocab[END_OF_TEXT], "content": END_OF_TEXT, "special": True,
        "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
    }  # fmt: skip
    pairs = [merge.decode("utf-8", "replace").split(" ", 1) for merge in merges]
    return {
        "version": "1.0",
        "added_tokens": [special],
        "pre_tokenizer": level,
        "decoder": level,
        "model": {"type": "BPE", "vocab": vocab, "merges": pairs},
    }
