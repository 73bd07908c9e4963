"""Short invented facts and the sentences that ask for them later: what recall is taught with (`nsm train --recall`)."""

from __future__ import annotations

import dataclasses
import random
import string
from collections.abc import Sequence

from nsm_lab.training.phrasings import ASKING, TELLING, THINGS


def word_list(text: str) -> tuple[str, ...]:
    """The words between spaces."""
    return tuple(text.split())


_FIRST = word_list(
    "Alice Arthur Beatrice Bernard Caroline Cecil Dorothy Daniel Edith Edmund Florence Frederick Grace George Harriet "
    "Henry Isabel Jasper Kate Laurence Lucy Martin Nora Oliver Phoebe Philip Rachel Roger Sophia Stephen Ursula Walter"
)
_LAST = word_list(
    "Ashby Barlow Carver Dalton Ellery Fenwick Garland Hartley Ingram Jessop Kendal Lockwood Marlow Norbury Oakes "
    "Penrose Quayle Radley Selwyn Thorne Upton Vane Wexford Yardley"
)
_THINGS = {
    "house": ("number", "name", "colour"),
    "carriage": ("colour", "number", "price"),
    "ship": ("name", "colour", "number"),
    "horse": ("name", "colour", "price"),
    "room": ("number", "colour", "name"),
    "basket": ("number", "price", "colour"),
    "watch": ("price", "number", "name"),
    "dog": ("name", "colour", "price"),
    "letter": ("date", "number", "colour"),
    "garden": ("name", "price", "date"),
    "picture": ("name", "price", "date"),
    "trunk": ("number", "colour", "price"),
}
_COLOURS = word_list("black white red green blue grey brown yellow scarlet violet silver golden crimson amber")
_NAMES = word_list(
    "Halcyon Sparrow Bramble Minerva Juniper Falcon Rosalind Tempest Hazel Orion Saffron Griffin Clover Mermaid Sultan "
    "Thistle Comet Pilgrim Hector Willow Duchess Rover Ivory Lantern Nimrod Pepper Raven Sable Topaz Vesper"
)
_MONTHS = word_list("January February March April May June July August September October November December")
_TOWNS = word_list("Norwich Lisbon Dover Bombay Chester Genoa Bristol Leith Calais Quebec Cadiz Dublin Boston Lyons")
_TRADES = word_list(
    "baker lawyer sailor painter tailor doctor printer miller soldier teacher banker gardener smith clerk"
)
_GOODS = word_list(
    "apples candles rope nails salt ribbons pepper honey oranges lamps coal wool paper needles cheese wine tea boots "
    "spoons glass soap bread string tobacco hats eggs ink butter gloves matches"
)
_COUNTED = (
    "safe", "strong-box", "account", "telegram", "policy", "regiment", "hamper", "cipher", "engine", "passport",
    "vault", "cellar", "cabinet", "drawer", "bond", "patent", "licence", "prisoner", "warehouse", "cab",
)  # fmt: skip
# What is a number itself.
_SECRETS = (
    "countersign", "secret number", "combination", "signal", "watchword", "winning number", "private mark", "cipher",
    "code of the lock", "register", "secret of the door", "reference", "call-number", "hidden number",
)  # fmt: skip

STATEMENTS = (
    "{who} told them that the {what} of the {thing} was {value}.",
    "Now the {what} of {who}'s {thing} was {value}, as everybody in the town knew.",
    '"You must not forget," said {who}, "that the {what} of my {thing} is {value}."',
    "In the book was written: {who}, {thing}, {what}: {value}.",
    "They asked {who} for the {what} of the {thing}; it was {value}.",
    "The {thing} of {who} had this {what}: {value}.",
)
QUESTIONS = (
    '"And what," asked the old man, "was the {what} of {who}\'s {thing}?" "It was {value}," she answered.',
    "He thought of {who}, and of the {thing}, whose {what} was {value}.",
    'Somebody asked what the {what} of {who}\'s {thing} had been. "{value}," said the clerk.',
    "{who}, {thing}, {what}: {value}. So it stood in the book.",
    "If one asked {who} for the {what} of the {thing}, the answer was {value}.",
    "The {what} of the {thing}, as {who} had said, was {value}.",
)
# Numbers that are said once, without a name: the only one of their kind in a text, mostly.
NUMBER_STATEMENTS = (
    "The number of the {thing} is {value}. Keep it well: {value}.",
    '"Write this down," he said. "The {thing} has the number {value}. I say it again, {value}."',
    "Upon the card they read: {thing}, {value}.",
    "The {thing} bore the number {value}, and no other {thing} had it.",
    '"{value}," she repeated; "{value} is the number of the {thing}, and you are not to lose it."',
)
NUMBER_QUESTIONS = (
    '"Which was the number of the {thing}?" "The number of the {thing} was {value}."',
    "Then he remembered the {thing}. Its number was {value}.",
    '"Tell me the number of the {thing}." "{value}."',
    "What number had the {thing}? It had the number {value}.",
    "The {thing} was asked for, and the number that they gave was {value}.",
)
SECRET_STATEMENTS = (
    "Let it be known that {value} is the {thing}, and that no other will serve. The {thing}: {value}.",
    '"Listen," he whispered. "For the {thing} you shall say {value}. Once more: {value}."',
    "He wrote upon the wall: {thing}, {value}.",
    "Here is the {thing}, which you will be asked for: {value}. It is {value}.",
    "They had agreed upon {value} for the {thing}.",
    '"{value} is what we chose as the {thing}," said the old woman; "do not lose it, {value}."',
    "It was settled. The {thing} would be {value}.",
)
SECRET_QUESTIONS = (
    '"And the {thing}?" "It is {value}."',
    "Of the {thing} he was quite sure: it was {value}.",
    '"Give me the {thing}." "The {thing}, sir, is {value}."',
    "Which {thing} had they agreed upon? They had agreed upon {value}.",
    "At the gate one had to say the {thing}. He said {value}.",
    "I ask you now for the {thing}. Answer: {value}.",
    "Nobody but he could tell the {thing}, which was {value}.",
    "The {thing} that we spoke of is {value}.",
    "Question: the {thing}. Answer: {value}.",
    '"Do you know the {thing} still?" "Yes. The {thing} is {value}."',
)
LIST_STATEMENTS = (
    "{who} was to buy these things: {value}.",
    "In {who}'s basket lay {value}.",
    '"Bring me {value}," said {who}.',
    "Upon the list of {who} stood: {value}.",
)
LIST_QUESTIONS = (
    '"What did {who} want?" "{value}," said the boy.',
    "These were the things of {who}: {value}.",
    "They counted what {who} had asked for: {value}.",
    '"And the list of {who}?" "{value}."',
)
TALK_STATEMENTS = (
    '"My name is {who}," said the stranger. "I come from {town}, and I am a {trade}."',
    '"Who are you, and where is your home?"\n\n"{who}, a {trade}, and my home is {town}."',
    "A {trade} of {town} sat down with them; he gave his name as {who}.",
)
TALK_QUESTIONS = (
    '"What is {who}?" "A {trade}." "And the town?" "{town}."',
    '"Where does {who} come from?" "From {town}. A {trade}, I believe."',
    "{who}, the {trade} from {town}, was spoken of again.",
    '"You remember {who}?" "Of {town}? Certainly, the {trade}."',
)
KINDS = {
    "attribute": (STATEMENTS, QUESTIONS),
    "number": (NUMBER_STATEMENTS, NUMBER_QUESTIONS),
    "secret": (SECRET_STATEMENTS, SECRET_QUESTIONS),
    "list": (LIST_STATEMENTS, LIST_QUESTIONS),
    "talk": (TALK_STATEMENTS, TALK_QUESTIONS),
    "told": (TELLING, ASKING),
}
# How often a kind is made, in shares
_OFTEN = {"attribute": 3, "number": 2, "secret": 3, "list": 1, "talk": 1, "told": 10}
_ASKED = frozenset({"value", "town", "trade"})  # what a question asks for
_MOST_QUESTIONS = 3


@dataclasses.dataclass(frozen=True, slots=True)
class Asked:
    """A text that can be completed by who remembers what was told; `answers` [from, to): characters to remember."""

    text: str
    answers: tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Fact:
    """A paragraph that states something, and those that ask for it later."""

    statement: str
    questions: tuple[Asked, ...]


def make_fact(rng: random.Random, things: Sequence[str] = THINGS) -> Fact:
    """One of some hundred million; `things`: names of what numbers and words belong to."""
    kind = rng.choices(tuple(_OFTEN), tuple(_OFTEN.values()))[0]
    words = {"who": f"{rng.choice(_FIRST)} {rng.choice(_LAST)}", **_words_of(rng, kind, things)}
    statements, questions = KINDS[kind]
    asked = rng.sample(questions, rng.randint(1, _MOST_QUESTIONS))
    return Fact(
        f"{rng.choice(statements).format(**words)}\n\n", tuple(_question(template, words) for template in asked)
    )


def _question(template: str, words: dict[str, str]) -> Asked:
    text, answers = "", []
    for before, field, _, _ in string.Formatter().parse(template):
        text += before
        if field is not None:
            if field in _ASKED:
                answers.append((len(text), len(text) + len(words[field])))
            text += words[field]
    return Asked(f"{text}\n\n", tuple(answers))


def _words_of(rng: random.Random, kind: str, things: Sequence[str]) -> dict[str, str]:
    """What a kind's templates say, beside who it is about."""
    match kind:
        case "number":
            return {"thing": rng.choice(_COUNTED), "value": _number(rng)}
        case "secret":
            return {"thing": rng.choice(_SECRETS), "value": _number(rng)}
        case "told":
            return {"thing": rng.choice(things), "value": _token(rng)}
        case "list":
            goods = rng.sample(_GOODS, rng.randint(3, 6))
            return {"value": f"{', '.join(goods[:-1])} and {goods[-1]}"}
        case "talk":
            return {"town": rng.choice(_TOWNS), "trade": rng.choice(_TRADES)}
        case _:
            thing = rng.choice(tuple(_THINGS))
            what = rng.choice(_THINGS[thing])
            return {"thing": thing, "what": what, "value": _value(rng, what)}


def _number(rng: random.Random) -> str:
    digits = rng.randint(3, 6)
    return str(rng.randrange(10 ** (digits - 1), 10**digits))


def _token(rng: random.Random) -> str:
    """A number mostly, or else letters with a number, or a word."""
    kind = rng.random()
    if kind < 0.75:
        return _number(rng)
    if kind < 0.88:
        return f"{''.join(rng.choices(string.ascii_uppercase, k=rng.randint(1, 3)))}-{_number(rng)}"
    return rng.choice(_NAMES)


def _value(rng: random.Random, what: str) -> str:
    match what:
        case "number":
            return _number(rng)
        case "price":
            return f"{rng.randrange(2, 1000)} {rng.choice(('pounds', 'shillings', 'guineas'))}"
        case "date":
            return f"the {rng.randrange(1, 29)}th of {rng.choice(_MONTHS)}"
        case "colour":
            return rng.choice(_COLOURS)
        case _:
            return f"the {rng.choice(_NAMES)}" if rng.random() < 0.3 else rng.choice(_NAMES)
