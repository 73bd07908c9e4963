"""Short invented facts and the sentences that ask for them later: what recall is taught with (`nsm train --recall`)."""

from __future__ import annotations

import dataclasses
import random


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_FIRST = _words(
    "Alice Arthur Beatrice Bernard Caroline Cecil Dorothy Daniel Edith Edmund Florence Frederick Grace George Harriet "
    "Henry Isabel Jasper Kate Laurence Lucy Martin Nora Oliver Phoebe Philip Rachel Roger Sophia Stephen Ursula Walter"
)
_LAST = _words(
    "Ashby Barlow Carver Dalton Ellery Fenwick Garland Hartley Ingram Jessop Kendal Lockwood Marlow Norbury Oakes "
    "Penrose Quayle Radley Selwyn Thorne Upton Vane Wexford Yardley"
)
_THINGS = {
    "house": ("number", "name", "colour"),
    "carriage": ("colour", "number", "price"),
    "ship": ("name", "colour", "number"),
    "horse": ("name", "colour", "price"),
    "room": ("number", "colour", "name"),
    "ticket": ("number", "price", "colour"),
    "watch": ("price", "number", "name"),
    "dog": ("name", "colour", "price"),
    "letter": ("date", "number", "colour"),
    "garden": ("name", "price", "date"),
    "picture": ("name", "price", "date"),
    "trunk": ("number", "colour", "price"),
}
_COLOURS = _words("black white red green blue grey brown yellow scarlet violet silver golden crimson amber")
_NAMES = _words(
    "Halcyon Sparrow Bramble Minerva Juniper Falcon Rosalind Tempest Hazel Orion Saffron Griffin Clover Mermaid Sultan "
    "Thistle Comet Pilgrim Hector Willow Duchess Rover Ivory Lantern Nimrod Pepper Raven Sable Topaz Vesper"
)
_MONTHS = _words("January February March April May June July August September October November December")
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


@dataclasses.dataclass(frozen=True, slots=True)
class Fact:
    """Two paragraphs: one that states something, and one that can be completed by who remembers it."""

    statement: str
    question: str


def _value(rng: random.Random, what: str) -> str:
    match what:
        case "number":
            return str(rng.randrange(10, 10 ** rng.randint(2, 6)))
        case "price":
            return f"{rng.randrange(2, 1000)} {rng.choice(('pounds', 'shillings', 'guineas'))}"
        case "date":
            return f"the {rng.randrange(1, 29)}th of {rng.choice(_MONTHS)}"
        case "colour":
            return rng.choice(_COLOURS)
        case _:
            return f"the {rng.choice(_NAMES)}" if rng.random() < 0.3 else rng.choice(_NAMES)


def make_fact(rng: random.Random) -> Fact:
    """One of some hundred million."""
    who = f"{rng.choice(_FIRST)} {rng.choice(_LAST)}"
    thing = rng.choice(tuple(_THINGS))
    what = rng.choice(_THINGS[thing])
    words = {"who": who, "thing": thing, "what": what, "value": _value(rng, what)}
    statement, question = (rng.choice(templates).format(**words) for templates in (STATEMENTS, QUESTIONS))
    return Fact(f"{statement}\n\n", f"{question}\n\n")
