"""Sentences that tell a number or a word and ask for it later, made by combination.

Whoever learns to answer thirty questions has learned thirty questions. So what asks, how the answer begins, the words
right before it and how both are set are varied apart. `{thing}`, `{value}` and `{who}` are filled in by `facts.py`.
The names of what is asked for come from the text itself: with 254 names a model answered all of these questions, and
none about a name that it had not met. "What is the ...?" is left out, and so are the words of
`nsm eval --suite history` and `passkey`: they are for the test.
"""

from __future__ import annotations

import itertools
import random
import re
from collections import Counter
from collections.abc import Iterable

NOT_TAUGHT = ("pass", "key")  # in the names that evaluation asks for
MOST_WORDS, FEWEST_TIMES = 5000, 20  # that name something in the text, and how often they must
NUM_PAIRS = 16_000  # names of two such words
_AFTER_ARTICLE = re.compile(r"\bthe ([a-z]{3,11})\b")

_OPENINGS = (
    "", "Take note. ", "Mark this well. ", '"Hear me," said {who}. ', "It was made known to all. ",
    "There was a paper on the table. ", "{who} came in and shut the door. ",
)  # fmt: skip
_REPORTED = (
    "The {thing} is {value}.", "The {thing}: {value}.", "For the {thing} take {value}.", "{value} is the {thing}.",
    "As the {thing} they had chosen {value}.", "{who} has {value} for the {thing}.", "The {thing} was now {value}.",
    "Whoever wants the {thing} must say {value}.", "The {thing} that {who} gave was {value}.",
)  # fmt: skip
_AFTERWARDS = (
    "", " Do not forget it.", " {value}, and nothing else.", " Once more: {value}.", " So {value} it was.",
    " {who} wrote it down: {value}.", " The {thing} is {value}, I say again.",
)  # fmt: skip
_QUESTIONS = (
    "Which is the {thing}?", "What was the {thing}?", "Tell me the {thing}.", "I want the {thing}.", "The {thing}?",
    "Have you the {thing} still?", "Now for the {thing}.", "How does the {thing} run?", "And the {thing}, then?",
    "What had they taken as the {thing}?", "Do you recall the {thing}?", "Let us hear the {thing}.",
    "You were told the {thing}.", "Nobody may enter without the {thing}.", "Say the {thing}, and you may go.",
    "Where is the {thing}?", "There was something about the {thing}.", "Of what sort was the {thing}?",
    "They came back to the {thing}.", "Can you give the {thing}?", "{who} wished to know the {thing}.",
    "I have need of the {thing} that {who} spoke of.", "One thing is wanting, the {thing}.", "Look up the {thing}.",
)  # fmt: skip
_ANSWERS = (
    "The {thing} is {value}", "The {thing} was {value}", "It is {value}", "It was {value}", "{value}",
    "That is {value}",
    "Answer: {value}", "The {thing}: {value}", "I have it here: {value}", "The {thing} must be {value}",
    "They said {value}", "We agreed upon {value}", "The {thing} that was given is {value}", "The {thing} reads {value}",
    "Yes, {value}", "The {thing} of which you speak is {value}", "It stands written as {value}",
    "I remember the {thing} as {value}", "{who} called it {value}", "Surely the {thing} is {value}",
    "The right {thing} has always been {value}", "My {thing} is {value}", "This {thing} is {value}",
    "Then I should answer {value}",
)  # fmt: skip
_FRAMES = (
    "{asked} {answered}.", "{asked} {answered}, and so it remained.", '"{asked}" "{answered}."',
    '"{asked}" said {who}. "{answered}."', '"{asked}"\n\n"{answered}," was the reply.', "{asked}\n{answered}",
    "Question: {asked}\nAnswer: {answered}.", '{who} began: "{asked}" And somebody said: "{answered}."',
)  # fmt: skip

TELLING = tuple(map("".join, itertools.product(_OPENINGS, _REPORTED, _AFTERWARDS)))
ASKING = tuple(
    setting.replace("{asked}", asked).replace("{answered}", answered)
    for setting, asked, answered in itertools.product(_FRAMES, _QUESTIONS, _ANSWERS)
)

_BUILDINGS = (
    "gate", "tower", "harbour", "mill", "bridge", "chapel", "garden", "stable", "library", "attic", "ferry", "prison",
    "bank", "theatre", "station", "hospital", "castle", "market", "well", "barn", "office", "inn", "school", "museum",
)  # fmt: skip
_MARKS = ("number", "code", "sign", "mark", "signal", "figure", "cipher", "token", "lock", "seal")
THINGS = tuple(f"{building} {mark}" for building, mark in itertools.product(_BUILDINGS, _MARKS))


def things_in(texts: Iterable[str], rng: random.Random, *, fewest_times: int = FEWEST_TIMES) -> tuple[str, ...]:
    """Names of things that `texts` speak of, each twice, pairs of such words, and THINGS."""
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(_AFTER_ARTICLE.findall(text))
    common = (word for word, times in counts.most_common(MOST_WORDS) if times >= fewest_times)
    words = [word for word in common if not any(part in word for part in NOT_TAUGHT)]
    if not words:
        return THINGS
    pairs = [f"{rng.choice(words)} {rng.choice(words)}" for _ in range(NUM_PAIRS)]
    return (*pairs, *words, *words, *THINGS)
