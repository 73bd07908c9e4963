"""What is told in passing: every answer was told, and the sentences of the tests stay out of training."""

from __future__ import annotations

import random
import re

import pytest

from nsm_lab.training.passing import FAMILIES, NOT_TAUGHT, Vocabulary, invented, make_mention, plural

WORDS = Vocabulary(("lantern", "mountain", "house", "army"), ("Ellen", "Norfolk", "Darcy"))
SEVERAL = 3000


@pytest.fixture(scope="module")
def mentions() -> list:
    rng = random.Random(0)
    return [make_mention(rng, WORDS) for _ in range(SEVERAL)]


def test_every_answer_was_stated(mentions: list) -> None:
    for fact in mentions:
        for question in fact.questions:
            assert question.answers
            for first, last in question.answers:
                assert question.text[first:last].lower() in fact.statement.text.lower()


def test_a_value_that_is_only_stated_is_no_answer(mentions: list) -> None:
    without = [fact for fact in mentions if not fact.statement.answers]
    assert 0.8 < len(without) / len(mentions) < 0.95  # the others are asked for at once


def test_sentences_begin_with_a_space_and_paragraphs_end_with_line_breaks(mentions: list) -> None:
    for fact in mentions:
        for asked in (fact.statement, *fact.questions):
            assert asked.text.startswith(" ") == fact.is_inline
            assert asked.text.endswith("\n\n") != fact.is_inline
            assert "\x00" not in asked.text
            assert not re.search(r"[{}]", asked.text)
    assert 0.2 < sum(fact.is_inline for fact in mentions) / len(mentions) < 0.7


def test_the_words_of_the_tests_are_never_used(mentions: list) -> None:
    for fact in mentions:
        for asked in (fact.statement, *fact.questions):
            said = asked.text.lower()
            assert not any(word in said for word in NOT_TAUGHT)
            assert "what is the" not in said


def test_a_number_ends_where_its_answer_ends(mentions: list) -> None:
    for fact in mentions:
        for question in fact.questions:
            assert all(not question.text[last].isdigit() for _, last in question.answers)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_has_statements_and_questions_that_name_its_value(family: str) -> None:
    parts = FAMILIES[family]
    of_draw = parts.draw(random.Random(0), WORDS)
    for template in (*parts.statements, *parts.answers, *parts.sentences):
        drawn = "".join(of_draw.get(name, "") for name in re.findall(r"{(\w+)}", template))
        assert "{value}" in template or "\x00" in drawn
    assert all("{value}" not in ask for ask in parts.asks)


def test_nouns_and_names_come_from_the_text() -> None:
    text = "we saw Norfolk by the harbour and the passport of the oilman. " * 30
    words = Vocabulary.of([text])
    assert words == Vocabulary(("harbour",), ("Norfolk",))
    assert Vocabulary.of(["nothing"]).nouns


def test_invented_names_are_many_and_hold_no_word_of_the_tests() -> None:
    rng = random.Random(0)
    names = {invented(rng) for _ in range(SEVERAL)}
    assert len(names) > 0.9 * SEVERAL
    assert not any(word in name.lower() for name in names for word in NOT_TAUGHT)


@pytest.mark.parametrize(
    ("noun", "several"), [("box", "boxes"), ("army", "armies"), ("boy", "boys"), ("lamp", "lamps")]
)
def test_plurals(noun: str, several: str) -> None:
    assert plural(noun) == several
