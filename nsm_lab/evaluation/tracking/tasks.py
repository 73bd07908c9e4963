"""Tasks that need a state which is followed token by token: parity, sums, permutations, brackets, copying."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]

NOT_ASKED = -100  # as a target, where nothing is to be predicted
MODULUS = 5
NUM_CUPS = 5
# Identity, one exchange, the cycle and its inverse: together they make all 120 permutations of five things.
MOVES = np.array([[0, 1, 2, 3, 4], [1, 0, 2, 3, 4], [1, 2, 3, 4, 0], [4, 0, 1, 2, 3]])
MAX_DEPTH = 6
NUM_KINDS = 2  # of brackets
NUM_SYMBOLS = 8  # that are copied
ASK = NUM_SYMBOLS


@dataclasses.dataclass(frozen=True, slots=True)
class TrackingTask:
    """`make(rng, rows, length)` gives tokens and targets, both [rows, T]: T is `length`, in copying twice that.

    `is_running`: a target at every token, from the tokens so far. `length`: the longest of training. `num_tokens`:
    different tokens and targets together.
    """

    name: str
    title: str
    make: Callable[[np.random.Generator, int, int], tuple[IntArray, IntArray]]
    num_tokens: int
    length: int = 32
    is_running: bool = True


def parity(rng: np.random.Generator, rows: int, length: int) -> tuple[IntArray, IntArray]:
    """Bits; is the number of ones so far odd?"""
    bits = rng.integers(2, size=(rows, length))
    return bits, bits.cumsum(axis=1) % 2


def modular_sum(rng: np.random.Generator, rows: int, length: int) -> tuple[IntArray, IntArray]:
    """Digits 0 to 4; their sum so far, modulo 5."""
    digits = rng.integers(MODULUS, size=(rows, length))
    return digits, digits.cumsum(axis=1) % MODULUS


def permutations(rng: np.random.Generator, rows: int, length: int) -> tuple[IntArray, IntArray]:
    """Moves of five cups, words over generators of the group S5; which cup hides the ball that began under the first?

    What must be followed has five states and the whole of S5 as its transitions, a group that is not solvable.
    """
    words = rng.integers(len(MOVES), size=(rows, length))
    hiding = np.empty_like(words)
    cup = np.zeros(rows, dtype=np.int64)
    for position in range(length):
        cup = MOVES[words[:, position], cup]
        hiding[:, position] = cup
    return words, hiding


def brackets(rng: np.random.Generator, rows: int, length: int) -> tuple[IntArray, IntArray]:
    """Brackets of two kinds, at most six deep (Dyck-2); which kind is open innermost, or none (0)?

    Tokens 0 and 1 open a bracket of their kind, 2 and 3 close it.
    """
    tokens, innermost = np.empty((rows, length), dtype=np.int64), np.empty((rows, length), dtype=np.int64)
    stack, depth = np.zeros((rows, MAX_DEPTH + 1), dtype=np.int64), np.zeros(rows, dtype=np.int64)
    every = np.arange(rows)
    for position in range(length):
        opens = np.where(depth == 0, True, np.where(depth == MAX_DEPTH, False, rng.integers(2, size=rows) == 1))
        kind = np.where(opens, rng.integers(NUM_KINDS, size=rows), stack[every, depth] - 1)
        depth = np.where(opens, depth + 1, depth - 1)
        stack[every[opens], depth[opens]] = kind[opens] + 1
        tokens[:, position] = np.where(opens, kind, NUM_KINDS + kind)
        innermost[:, position] = np.where(depth == 0, 0, stack[every, depth])
    return tokens, innermost


def copying(rng: np.random.Generator, rows: int, length: int) -> tuple[IntArray, IntArray]:
    """Symbols, then as many requests; to each request the next of the symbols is the answer."""
    symbols = rng.integers(NUM_SYMBOLS, size=(rows, length))
    tokens = np.concatenate((symbols, np.full_like(symbols, ASK)), axis=1)
    return tokens, np.concatenate((np.full_like(symbols, NOT_ASKED), symbols), axis=1)


TASKS: dict[str, TrackingTask] = {
    task.name: task
    for task in (
        TrackingTask("parity", "parity", parity, 2),
        TrackingTask("sum", "sum modulo 5", modular_sum, MODULUS),
        TrackingTask("s5", "S5, five cups", permutations, NUM_CUPS),
        TrackingTask("dyck", "Dyck-2, depth 6", brackets, 2 * NUM_KINDS),
        TrackingTask("copy", "copying", copying, NUM_SYMBOLS + 1, length=16, is_running=False),
    )
}
