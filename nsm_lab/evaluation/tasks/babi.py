"""bAbI (Weston et al. 2015): questions about short stories, answered with one word.

Reads the published files, and draws stories of the kinds of tasks 1 and 2 in the same words and the same format, by our
own rules.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator

PEOPLE = ("Daniel", "John", "Mary", "Sandra")
ROOMS = ("bathroom", "bedroom", "garden", "hallway", "kitchen", "office")
THINGS = ("apple", "football", "milk")
MOVES = ("journeyed to", "moved to", "travelled to", "went back to", "went to")
TAKES = ("got", "grabbed", "picked up", "took")
DROPS = ("discarded", "dropped", "left", "put down")


@dataclasses.dataclass(frozen=True, slots=True)
class Question:
    """`story`: the sentences before the question, earlier questions left out. `supports`: numbers of its lines."""

    story: tuple[str, ...]
    question: str
    answer: str
    supports: tuple[int, ...]


def read_questions(text: str) -> Iterator[Question]:
    """Of a file: lines `ID sentence` and `ID question<TAB>answer<TAB>IDs`; IDs start again at 1 with a new story.

    Raises ValueError for other lines.
    """
    story: list[str] = []
    for line in text.splitlines():
        number, _, rest = line.partition(" ")
        if not number.isdigit():
            raise ValueError(f"no line of a bAbI file: {line[:80]!r}")
        if number == "1":
            story = []
        if "\t" not in rest:
            story.append(rest.strip())
            continue
        question, answer, supports = rest.split("\t")
        yield Question(tuple(story), question.strip(), answer, tuple(int(part) for part in supports.split()))


def words(sentence: str) -> list[str]:
    """Lower case; the final mark becomes a word."""
    return [*sentence[:-1].lower().split(), sentence[-1]]


def draw_story(task: int, num_events: int, draw: random.Random) -> str:
    """Lines of a story of task 1 or 2 with a question after its last event, in the format of the files."""
    events = _Events(draw, has_things=task == 2)
    while True:
        lines = [events.draw_one() for _ in range(num_events)]
        asked = events.ask()
        if asked is not None:
            return "".join(f"{number} {line}\n" for number, line in enumerate([*lines, asked], start=1))
        events = _Events(draw, has_things=task == 2)


class _Events:
    """Positions of persons and things, their holders, and the lines that prove them."""

    def __init__(self, draw: random.Random, *, has_things: bool) -> None:
        self._draw, self._has_things, self._line = draw, has_things, 0
        self._locations: dict[str, tuple[str, int]] = {}  # of people: the place, and the line that tells it
        self._holders: dict[str, tuple[str, int]] = {}  # of things that somebody holds
        self._dropped: dict[str, tuple[str, int, int]] = {}  # of things that lie somewhere: place, its line, the drop's

    def draw_one(self) -> str:
        self._line += 1
        kind = self._draw.choice(("move", "take", "drop")) if self._has_things else "move"
        if kind == "take" and (able := self._able_to_take()):
            return self._take(*self._draw.choice(able))
        if kind == "drop" and self._holders:
            return self._drop(self._draw.choice(sorted(self._holders)))
        return self._move()

    def _move(self) -> str:
        person, room = self._draw.choice(PEOPLE), self._draw.choice(ROOMS)
        self._locations[person] = (room, self._line)
        return f"{person} {self._draw.choice(MOVES)} the {room}."

    def _able_to_take(self) -> list[tuple[str, str]]:
        """(person, thing) pairs: a new thing, or one at the person's position."""
        pairs = [
            (person, thing) for person in sorted(self._locations) for thing in THINGS if thing not in self._holders
        ]
        where = {thing: room for thing, (room, _, _) in self._dropped.items()}
        return [
            (who, what) for who, what in pairs if where.get(what, self._locations[who][0]) == self._locations[who][0]
        ]

    def _take(self, person: str, thing: str) -> str:
        self._dropped.pop(thing, None)
        self._holders[thing] = (person, self._line)
        return f"{person} {self._draw.choice(TAKES)} the {thing} there."

    def _drop(self, thing: str) -> str:
        person, _ = self._holders.pop(thing)
        self._dropped[thing] = (*self._locations[person], self._line)
        return f"{person} {self._draw.choice(DROPS)} the {thing}."

    def ask(self) -> str | None:
        """A question that the story answers; None: it answers none."""
        known = {thing: (*self._locations[person], line) for thing, (person, line) in self._holders.items()}
        known |= self._dropped
        if not self._has_things:
            person = self._draw.choice(sorted(self._locations))
            room, line = self._locations[person]
            return f"Where is {person}? \t{room}\t{line}"
        if not known:
            return None
        thing = self._draw.choice(sorted(known))
        room, of_room, of_hand = known[thing]
        return f"Where is the {thing}? \t{room}\t{of_hand} {of_room}"
