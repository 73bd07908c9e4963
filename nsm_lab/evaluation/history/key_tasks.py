"""Keys to hide in a text and the questions for them, as token ids: the measurement needs no tokenizer."""

from __future__ import annotations

import dataclasses
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from nsm_core.errors import ConfigError

NUM_CHOICES = 10
NEEDLE = "\n\nThe pass key is {key}. Remember it. {key} is the pass key.\n\n"
QUESTION = "\n\nWhat is the pass key? The pass key is"
_ANSWER = " {key}"
# Keys that are encoded to find enough of one length in tokens.
_POOL = 2000

Encode = Callable[[str], Sequence[int]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KeyTask:
    """A key. `needle` tells it, `question` asks for it, `answers` are the right key and nine others, all as token ids.

    All answers have equally many tokens, so their log-probabilities compare.
    """

    needle: tuple[int, ...]
    question: tuple[int, ...]
    answers: tuple[tuple[int, ...], ...]


def make_key_tasks(
    encode: Encode, count: int, *, needle: str = NEEDLE, question: str = QUESTION, seed: int = 0
) -> list[KeyTask]:
    """`count` tasks with five-digit keys, whose needles and answers have the same lengths in tokens throughout.

    `needle` has one or more `{key}`. Raises ConfigError when the tokenizer cuts too few keys into equally many tokens.
    """
    rng = np.random.default_rng(seed)
    by_length: dict[tuple[int, int], list[str]] = defaultdict(list)
    for key in map(str, rng.choice(90_000, _POOL, replace=False) + 10_000):
        by_length[len(encode(needle.format(key=key))), len(encode(_ANSWER.format(key=key)))].append(key)
    keys = max(by_length.values(), key=len)
    if len(keys) < NUM_CHOICES:
        raise ConfigError(f"of {_POOL} keys only {len(keys)} have equally many tokens")
    return [_task(encode, needle, question, rng.choice(keys, NUM_CHOICES, replace=False)) for _ in range(count)]


def _task(encode: Encode, needle: str, question: str, keys: Iterable[str]) -> KeyTask:
    right, *others = keys
    return KeyTask(
        needle=tuple(encode(needle.format(key=right))),
        question=tuple(encode(question)),
        answers=tuple(tuple(encode(_ANSWER.format(key=key))) for key in (right, *others)),
    )


def tasks_to_json(tasks: Sequence[KeyTask]) -> str:
    return json.dumps([dataclasses.asdict(task) for task in tasks])


def tasks_from_json(text: str) -> list[KeyTask]:
    """What `tasks_to_json` wrote, perhaps on a machine that has the tokenizer."""
    return [
        KeyTask(
            needle=tuple(task["needle"]),
            question=tuple(task["question"]),
            answers=tuple(tuple(answer) for answer in task["answers"]),
        )
        for task in json.loads(text)
    ]
