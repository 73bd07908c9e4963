"""Multi-query associative recall as the Zoology suite poses it (Arora et al. 2023), generated in whole arrays.

A sequence lists key-value pairs, then repeats each key once at a random later place, where the value has to be
predicted. Everywhere else lie random tokens.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from nsm_core.errors import ConfigError

IntArray = npt.NDArray[np.int64]

VOCAB_SIZE = 8192
# Exponent of the power law of the gaps between a pair and its query: most queries come soon.
POWER = 0.01


@dataclasses.dataclass(frozen=True, slots=True)
class Task:
    """Sequences of `length` tokens with `pairs` key-value pairs."""

    length: int
    pairs: int
    num_examples: int

    def __post_init__(self) -> None:
        if self.pairs < 1 or self.length % 2 or 4 * self.pairs > self.length:
            raise ConfigError(
                f"a recall task needs an even length of at least 4 tokens a pair, got length {self.length} and "
                f"{self.pairs} pairs"
            )


# Zoology's original_mqar_configs
TRAIN_TASKS = (
    Task(64, 4, 100_000),
    Task(128, 8, 20_000),
    Task(256, 16, 20_000),
    Task(256, 32, 20_000),
    Task(256, 64, 20_000),
)
TEST_TASKS = (
    Task(64, 4, 1000),
    Task(64, 8, 1000),
    Task(64, 16, 1000),
    Task(128, 32, 1000),
    Task(256, 64, 1000),
    Task(512, 128, 1000),
    Task(1024, 256, 1000),
)


@dataclasses.dataclass(frozen=True, slots=True)
class Examples:
    """Sequences and their questions."""

    ids: IntArray  # [N, length]
    positions: IntArray  # [N, pairs]: where a key is repeated; nothing else counts
    values: IntArray  # [N, pairs]: what must be predicted there

    def __len__(self) -> int:
        return len(self.ids)


def generate(task: Task, rng: np.random.Generator, vocab_size: int = VOCAB_SIZE) -> Examples:
    """Keys from [1, V/2), values from [V/2, V), no key or value twice in a sequence.

    Raises ConfigError when the vocabulary has too few keys.
    """
    half = vocab_size // 2
    if task.pairs >= half:
        raise ConfigError(f"{task.pairs} pairs need a vocabulary of more than {2 * task.pairs} tokens")
    shape = (task.num_examples, task.pairs)
    keys, values = 1 + _distinct(half - 1, shape, rng), half + _distinct(vocab_size - half, shape, rng)
    context_len = 2 * task.pairs
    positions = context_len + 2 * _gaps((task.length - context_len) // 2, shape, rng)
    ids = rng.integers(vocab_size, size=(task.num_examples, task.length))
    ids[:, 0:context_len:2], ids[:, 1:context_len:2] = keys, values
    np.put_along_axis(ids, positions, keys, axis=1)
    return Examples(ids, positions, values)


def _distinct(high: int, shape: tuple[int, int], rng: np.random.Generator) -> IntArray:
    """[N, K] from [0, high), all different within a row, every such row equally likely.

    Repetitions are drawn again until there are none. No number is preferred by that, so none is in the result.
    """
    drawn = rng.integers(high, size=shape)
    pending = np.arange(len(drawn))
    while len(pending):
        rows = drawn[pending]
        order = np.argsort(rows, axis=1, kind="stable")
        in_order = np.take_along_axis(rows, order, axis=1)
        is_repeated = np.zeros(rows.shape, np.bool_)
        np.put_along_axis(is_repeated, order[:, 1:], in_order[:, 1:] == in_order[:, :-1], axis=1)
        rows[is_repeated] = rng.integers(high, size=int(is_repeated.sum()))
        drawn[pending] = rows
        pending = pending[is_repeated.any(axis=1)]
    return drawn


def _gaps(space: int, shape: tuple[int, int], rng: np.random.Generator) -> IntArray:
    """[N, K] from [0, space), all different within a row, drawn one after the other by the power law.

    The K largest of log p plus Gumbel noise, largest first, are distributed as such draws.
    """
    log_law = (POWER - 1.0) * np.log(np.arange(1, space + 1))
    scores = log_law + rng.gumbel(size=(shape[0], space))
    return np.argsort(-scores, axis=1)[:, : shape[1]]
