"""ListOps: our evaluator and our generator against published expressions, and that a model can learn it."""

from __future__ import annotations

import random

import pytest

from nsm_lab.evaluation.tasks.listops import (
    CLOSE,
    OPERATORS,
    VOCABULARY,
    ListOpsRules,
    draw_expression,
    evaluate,
    read_source,
    write_source,
)
from tests.nsm_lab.evaluation.tasks.learning import Examples, accuracy, as_examples, best_guess, learn, tiny_model
from tests.support.samples import listops_lines

SHORT = ListOpsRules(max_depth=2, max_args=3, longer_than=3, shorter_than=6)


def test_published_answers_and_sources_are_ours() -> None:
    lines = listops_lines()
    assert len(lines) == 100
    for answer, source in lines:
        tokens = read_source(source)
        assert evaluate(tokens) == int(answer)
        assert write_source(tokens) == source


@pytest.mark.parametrize(
    ("source", "answer"),
    [
        ("[MAX 2 9 [MIN 4 7 ] 0 ]", 9),
        ("[MED 1 5 2 8 ]", 3),  # of 2 and 5, without its fraction
        ("[MED 1 5 2 ]", 2),
        ("[SM 9 9 9 ]", 7),
        ("4", 4),
    ],
)
def test_answers_by_hand(source: str, answer: int) -> None:
    assert evaluate(source.split()) == answer


@pytest.mark.parametrize("source", ["", "[MAX 1 2", "[MAX ]", "1 2", "]", "[MAX 1 2 ] 3", "[TOP 1 ]", "[MIN 12 ]"])
def test_what_is_no_expression_is_refused(source: str) -> None:
    with pytest.raises(ValueError):
        evaluate(source.split())


def test_drawn_expressions_keep_the_rules() -> None:
    draw = random.Random(3)
    rules = ListOpsRules(longer_than=50, shorter_than=200)
    for _ in range(20):
        tokens = draw_expression(rules, draw)
        assert 50 < len(tokens) < 200
        assert 0 <= evaluate(tokens) <= 9
        assert read_source(write_source(tokens)) == tokens
        assert _depth(tokens) <= rules.max_depth
    same = [draw_expression(SHORT, random.Random(5)) for _ in range(2)]
    assert same[0] == same[1]


def _depth(tokens: list[str]) -> int:
    depth = deepest = 0
    for token in tokens:
        depth += (token in OPERATORS) - (token == CLOSE)
        deepest = max(deepest, depth)
    return deepest + 1  # the digits inside the deepest list


def examples(num_rows: int, draw: random.Random) -> Examples:
    rows = [draw_expression(SHORT, draw) for _ in range(num_rows)]
    return as_examples(rows, [str(evaluate(row)) for row in rows], VOCABULARY)


def test_a_small_model_learns_lists_of_two_and_three_digits() -> None:
    """On expressions of its own; of 4,400 that there are it has seen many."""
    draw = random.Random(0)
    model = tiny_model(len(VOCABULARY))
    learn(model, lambda: examples(48, draw), steps=150, lr=2e-2)
    test = examples(512, draw)
    assert accuracy(model, test) > 0.6
    assert best_guess(test) < 0.25
