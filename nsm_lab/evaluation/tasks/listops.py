"""ListOps (Nangia and Bowman 2018): nested list operations with one digit as the answer. Expressions are drawn by the
rules of the Long Range Arena's generator (Tay et al. 2020), in our own code; at any size.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Sequence

OPERATORS = ("[MIN", "[MAX", "[MED", "[SM")
CLOSE = "]"
DIGITS = tuple("0123456789")
VOCABULARY = (*DIGITS, *OPERATORS, CLOSE)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ListOpsRules:
    """The defaults are the Long Range Arena's. Lengths in tokens, brackets included, both bounds excluded."""

    max_depth: int = 10  # the root has depth 1; at this one there are digits only
    max_args: int = 10
    operator_share: float = 0.25  # of the nodes below the root that may be operators
    longer_than: int = 500
    shorter_than: int = 2000


def draw_expression(rules: ListOpsRules, draw: random.Random) -> list[str]:
    """Tokens of an expression that keeps the rules. Such lengths must be possible, or this never returns."""
    while True:
        tokens = _draw_operator(rules, draw, depth=1)
        if rules.longer_than < len(tokens) < rules.shorter_than:
            return tokens


def _draw_operator(rules: ListOpsRules, draw: random.Random, depth: int) -> list[str]:
    num_args = draw.randint(2, rules.max_args)
    args = [_draw_node(rules, draw, depth + 1) for _ in range(num_args)]
    return [draw.choice(OPERATORS), *itertools.chain.from_iterable(args), CLOSE]


def _draw_node(rules: ListOpsRules, draw: random.Random, depth: int) -> list[str]:
    if depth < rules.max_depth and draw.random() < rules.operator_share:
        return _draw_operator(rules, draw, depth)
    return [draw.choice(DIGITS)]


def evaluate(tokens: Sequence[str]) -> int:
    """The answer, 0 to 9. Raises ValueError for a text that is not an expression."""
    open_lists: list[tuple[str, list[int]]] = []
    for index, token in enumerate(tokens):
        if token in OPERATORS:
            open_lists.append((token, []))
            continue
        value = _close(open_lists) if token == CLOSE else _digit(token)
        if open_lists:
            open_lists[-1][1].append(value)
        elif index == len(tokens) - 1:
            return value
        else:
            break
    raise ValueError(f"no expression: {' '.join(tokens)[:80]!r}")


def _close(open_lists: list[tuple[str, list[int]]]) -> int:
    if not open_lists or not open_lists[-1][1]:
        raise ValueError("a list is closed that was not opened, or holds nothing")
    return _apply(*open_lists.pop())


def _digit(token: str) -> int:
    if token not in DIGITS:
        raise ValueError(f"no token of ListOps: {token!r}")
    return int(token)


def _apply(operator: str, values: list[int]) -> int:
    if operator == "[MIN":
        return min(values)
    if operator == "[MAX":
        return max(values)
    if operator == "[SM":
        return sum(values) % 10
    middle = sorted(values)[(len(values) - 1) // 2 : len(values) // 2 + 1]
    return sum(middle) // len(middle)


def read_source(source: str) -> list[str]:
    """Tokens of an expression as files write it: without the parentheses, which only pair what brackets pair."""
    return [token for token in source.split() if token not in "()"]


def write_source(tokens: Sequence[str]) -> str:
    """The inverse: a list is a left-branching tree of pairs, `( ( ( [MAX 2 ) 9 ) ] )`."""
    written: list[list[str]] = []
    for token in tokens:
        if token in OPERATORS:
            written.append([token])
            continue
        text = f"( {_paired(written.pop())} {CLOSE} )" if token == CLOSE else token
        if not written:
            return text
        written[-1].append(text)
    raise ValueError(f"no expression: {' '.join(tokens)[:80]!r}")


def _paired(parts: list[str]) -> str:
    text = parts[0]
    for part in parts[1:]:
        text = f"( {text} {part} )"
    return text
