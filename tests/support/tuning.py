"""Models and examples for tests of tuned states."""

from __future__ import annotations

import json

from nsm_core.chat_template import get_template
from nsm_core.loaded_model import LoadedModel, SequenceModel
from nsm_core.tokenizer import Tokenizer
from nsm_core.tuning.examples import Example, ExampleLimits, ExampleReader
from tests.support.models import RandomModel, as_loaded
from tests.support.rwkv7 import random_rwkv7

FAMILIES = ("N", "KW", "rwkv7")


def tunable(family: str, tokenizer: Tokenizer) -> LoadedModel[SequenceModel]:
    """A random model: of the NSM family by its layer pattern, or RWKV-7."""
    return random_rwkv7(tokenizer) if family == "rwkv7" else _random(tokenizer, family)


def _random(tokenizer: Tokenizer, pattern: str) -> LoadedModel[SequenceModel]:
    return as_loaded(
        RandomModel(tokenizer.vocab_size, layer_pattern=pattern, router="sigmoid", write_top_k=8), tokenizer
    )


def file_of(*lines: dict[str, object]) -> bytes:
    return "\n".join(json.dumps(line) for line in lines).encode()


def pairs(count: int) -> bytes:
    """Examples with one thing to learn: what comes after a colon."""
    return file_of(*({"prompt": f"Number {index}:", "completion": " yes"} for index in range(count)))


def examples_of(raw: bytes, tokenizer: Tokenizer, **limits: int) -> list[Example]:
    return ExampleReader(tokenizer, get_template("plain-v1"), ExampleLimits(**limits)).read(raw)
