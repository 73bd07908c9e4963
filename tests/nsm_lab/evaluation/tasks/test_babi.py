"""bAbI: published questions are read as they are meant, ours are of the same kind, and a model learns them by heart."""

from __future__ import annotations

import itertools
import random

import pytest

from nsm_lab.evaluation.tasks import babi
from nsm_lab.evaluation.tasks.babi import Question, draw_story, read_questions, words
from tests.nsm_lab.evaluation.tasks.learning import Examples, accuracy, as_examples, best_guess, learn, tiny_model
from tests.support.samples import babi_text

VOCABULARY = sorted(
    {word for verb in (*babi.MOVES, *babi.TAKES, *babi.DROPS) for word in verb.split()}
    | {name.lower() for name in (*babi.PEOPLE, *babi.ROOMS, *babi.THINGS)}
    | {"where", "is", "the", "there", ".", "?"}
)


def solve(question: Question) -> str:
    """By the rules of tasks 1 and 2: people are where they last went, things where they are carried or left."""
    where: dict[str, str] = {}
    held_by: dict[str, str] = {}
    for sentence in question.story:
        *before, last = sentence.removesuffix(".").removesuffix(" there").split()
        person, verb = before[0], " ".join(before[1:-1])
        if verb in babi.MOVES:
            where[person] = last
            where |= {thing: last for thing, holder in held_by.items() if holder == person}
        elif verb in babi.TAKES:
            held_by[last] = person
            if person in where:
                where[last] = where[person]
        else:
            assert verb in babi.DROPS
            del held_by[last]
    return where[question.question.removesuffix("?").split()[-1]]


@pytest.mark.parametrize(("task", "num_questions"), [(1, 100), (2, 60)])
def test_published_questions_are_read_as_they_are_meant(task: int, num_questions: int) -> None:
    questions = list(read_questions(babi_text(task)))
    assert len(questions) == num_questions
    for question in questions:
        assert solve(question) == question.answer
        assert len(question.supports) == task
        assert {word for text in (*question.story, question.question) for word in words(text)} <= set(VOCABULARY)


@pytest.mark.parametrize("task", [1, 2])
def test_drawn_stories_are_of_the_published_kind(task: int) -> None:
    draw = random.Random(task)
    for _ in range(100):
        text = draw_story(task, 12, draw)
        (question,) = read_questions(text)
        assert len(question.story) == 12
        assert solve(question) == question.answer
        assert len(question.supports) == task
        support = question.story[question.supports[-1] - 1]  # without other questions lines are sentences
        assert support.endswith(f"{question.answer}.")
    assert draw_story(task, 9, random.Random(4)) == draw_story(task, 9, random.Random(4))


@pytest.mark.parametrize("text", ["Mary went home.\n", "1 Mary went.\n2 Where is Mary?\thome\n", "x y\tz\t1\n"])
def test_other_lines_are_refused(text: str) -> None:
    with pytest.raises(ValueError):
        list(read_questions(text))


def examples(questions: list[Question]) -> Examples:
    rows = [list(itertools.chain.from_iterable(map(words, (*one.story, one.question)))) for one in questions]
    return as_examples(rows, [one.answer for one in questions], VOCABULARY)


def test_a_small_model_learns_published_questions_by_heart() -> None:
    """Of the shortest stories of both tasks. To answer new ones takes more steps than a test has time for."""
    questions = [one for task in (1, 2) for one in read_questions(babi_text(task)) if len(one.story) <= 6]
    published = examples(questions)
    model = tiny_model(len(VOCABULARY))
    learn(model, lambda: published, steps=60, lr=2e-2)
    assert best_guess(published) < 0.3
    assert accuracy(model, published) > 0.95
