# ruff: noqa: E501 - tables of sentences and words
"""Things that a text tells in passing, in ordinary sentences, and ordinary questions about them.

`phrasings.py` names a thing and its value and asks for it by that name: "The ... is ...". Most of what people tell has
another form: somebody put something into room 412, bought thirty sheep, has a sister called Ellen. Here a family is one
such relation; its statements, questions and answers are put together from parts that are drawn apart, and most nouns
and names come from the training text itself or are invented. `{value}` is what is asked for.

The sentences of `benchmarks.quality.written_numbers` and of `nsm eval` are for the test: their nouns (NOT_TAUGHT) and
"What is the ...?" never occur here. Their relations do: a place with a number, a count, a thing with a number.
"""

from __future__ import annotations

import dataclasses
import random
import re
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from nsm_lab.training.facts import Asked, word_list

NOT_TAUGHT = ("pass", "key", "locker", "parcel", "barrel", "convoy", "admiral", "ticket", "motor", "oil")
_STORED = "\x00"  # stands for the value until its place is known
MOST_NOUNS, MOST_NAMES, FEWEST_TIMES = 5000, 4000, 12
_NOUN = re.compile(r"\bthe ([a-z]{3,11})\b")
_NAME = re.compile(r"[a-z,;] ([A-Z][a-z]{2,10})\b")


def _lines(text: str) -> tuple[str, ...]:
    return tuple(line.strip() for line in text.strip().splitlines())


_NO_NAMES = frozenset(
    word_list(
        "The This That And But Mr Mrs Miss Sir God Lord Lady English French German American January February "
        "March April May June July August September October November December Sunday Monday Tuesday Wednesday "
        "Thursday Friday Saturday Dr Captain Christmas Christian What How Why Who When Where Yes You They "
        "There"
    )
)
_MEN = word_list(
    "Arthur Bernard Cecil Daniel Edmund Frederick George Henry Jasper Laurence Martin Oliver Philip Roger Tom"
)
_WOMEN = word_list(
    "Alice Beatrice Caroline Dorothy Edith Florence Grace Harriet Isabel Kate Lucy Nora Phoebe Rachel Ursula"
)
_ROLES_M = word_list("captain cook porter doctor clerk priest gardener soldier butler uncle farmer merchant boy miller")
_ROLES_F = word_list("widow nurse governess aunt maid girl duchess landlady actress seamstress")
_ONSETS = word_list("B Br C Cr D Dr F Fl G Gr H J K L M N P Pr R S St T Th Tr V W")
_VOWELS = word_list("a e i o u ai ea oo")
_MIDDLES = word_list("d l ll m n nd r rn rt s ss st t v w ck g b")
_ENDINGS = word_list("a by den el er ford ham ia ine is ley mund na on or ow ric ster ton us well wick")
_ROOMS = word_list(
    "room cabin cell drawer shelf box berth ward stall platform vault pew bin cupboard chest house hut tent office "
    "carriage bed cellar corridor gate pier bench desk row floor chapter page bay hall stable"
)
_NUMBERED = word_list(
    "engine coach company tram cab boat horse mill pump wagon battery hut ship tower gun raft balloon bus prisoner "
    "platoon station number house sledge runner dog cage machine van bell"
)
_COUNTABLE = word_list(
    "sheep nails apples horses candles letters eggs coins books chairs soldiers lamps bottles geese trees boys ropes "
    "sacks guns plates boats bricks hens pounds pictures rifles windows spoons blankets tents onions fish bees roses"
)
_TIMES = _lines(
    """last night
    before the rain began
    in the morning
    at Easter
    on the second day
    that winter
    when the others had gone
    the week before
    towards evening
    soon after dinner"""
)
_TAILS = (
    *(f" {time}" for time in _TIMES), *("",) * 8, " and went away", " without a word",
    ", and nobody saw it", " and thought no more of it", ", as {he} told the others", " with great care",
    ", which surprised them all", ", though it was late", " and locked the door", ", so they say",
    " and was glad of it", ", for reasons of {his} own", ", and then sat down to supper", ", to everybody's relief",
)  # fmt: skip
_LEADS = (
    *("",) * 9, "In the meantime ", "By the way, ", "It is true that ", "I remember that ", "They told me that ",
    "Some days earlier ", "Let me add that ", "As you know, ", "It happened that ", "I heard that ",
    "In those days ", "It was said that ", "Besides, ",
)  # fmt: skip
_FRAMES = (
    "{asked} {answered}", "{asked} {answered}", "{asked}\n\n{answered}", '"{asked}" "{answered}"',
    '"{asked}" asked {asker}. "{answered}"', '"{asked}" said {asker}.\n\n"{answered}"', '{asker} asked: "{asked}" "{answered}"',
    "Question: {asked} Answer: {answered}", "Question: {asked}\nAnswer: {answered}", "{asked}\n{answered}",
    "Q: {asked}\nA: {answered}", "- {asked}\n- {answered}",
)  # fmt: skip
_ENDS = (
    *(".",) * 12, "!", ", and that was all.", ", I believe.", ", as before.", "; {he} was sure of it.", ", if I am right.",
    ", and no other.", " after all.", ", of course.", ", you know.", " and nothing else.", ", {he} said.",
)  # fmt: skip
# past, base, participle, of what may be done with a thing
_PUT = tuple(
    tuple(verb.split("/"))
    for verb in word_list(
        "put/put/put hid/hide/hidden left/leave/left laid/lay/laid kept/keep/kept stored/store/stored dropped/drop/dropped "
        "placed/place/placed forgot/forget/forgotten found/find/found saw/see/seen locked/lock/locked lost/lose/lost"
    )
)
_GOT = tuple(
    tuple(verb.split("/"))
    for verb in word_list(
        "bought/buy/bought sold/sell/sold counted/count/counted brought/bring/brought sent/send/sent ordered/order/ordered "
        "took/take/taken found/find/found kept/keep/kept saw/see/seen lost/lose/lost stole/steal/stolen made/make/made "
        "carried/carry/carried owned/own/owned gathered/gather/gathered burned/burn/burned painted/paint/painted"
    )
)
_DID = tuple(
    tuple(verb.split("/"))
    for verb in word_list(
        "found/find/found stole/steal/stolen bought/buy/bought broke/break/broken mended/mend/mended took/take/taken "
        "sold/sell/sold painted/paint/painted burned/burn/burned hid/hide/hidden built/build/built lost/lose/lost "
        "cleaned/clean/cleaned opened/open/opened discovered/discover/discovered cut/cut/cut"
    )
)
_HAPPENED = _lines(
    """lost a wheel
    came first
    was left behind
    stood at the corner
    took the wrong road
    was painted green
    broke down near the bridge
    belonged to the old count
    had no windows
    reached the town before the storm
    was sold to a stranger
    caught fire
    sank in the river
    carried the flag
    was the best of them all
    stopped at midnight
    never came back
    ran into the ditch
    was given to the museum
    had a broken axle
    waited by the church
    saved the whole party"""
)
_RELATIVES = tuple(
    tuple(pair.split("/"))
    for pair in word_list(
        "brother/he sister/she father/he mother/she uncle/he aunt/she son/he daughter/she cousin/he friend/he wife/she "
        "husband/he dog/he cat/she horse/he parrot/he teacher/she neighbour/he cook/she servant/he master/he pony/he "
        "partner/he niece/she nephew/he grandfather/he grandmother/she doctor/he boat/she"
    )
)
_COLOURS = word_list(
    "black white red green blue grey brown yellow scarlet violet silver golden crimson pink purple orange"
)
_TRADES = word_list(
    "baker lawyer sailor painter tailor doctor printer miller soldier teacher banker gardener smith clerk carpenter "
    "barber chemist fisherman shepherd musician surgeon weaver mason butcher pilot judge poet nurse"
)
_UNITS = word_list("pounds shillings guineas dollars francs crowns florins roubles")
_STREETS = word_list("Street Road Lane Square Avenue Terrace Row Gardens")


@dataclasses.dataclass(frozen=True, slots=True)
class Vocabulary:
    """Nouns and names of a text."""

    nouns: tuple[str, ...]
    names: tuple[str, ...]

    @classmethod
    def of(cls, texts: Iterable[str], *, fewest_times: int = FEWEST_TIMES) -> Vocabulary:
        """What `texts` speak of at least so many times; without such words, lists of this module."""
        nouns, names = Counter[str](), Counter[str]()
        for text in texts:
            nouns.update(_NOUN.findall(text))
            names.update(_NAME.findall(text))
        return cls(
            _usable(nouns, MOST_NOUNS, fewest_times) or _ROOMS,
            tuple(name for name in _usable(names, MOST_NAMES, fewest_times) if name not in _NO_NAMES) or _MEN + _WOMEN,
        )


def _usable(counts: Counter[str], most: int, fewest_times: int) -> tuple[str, ...]:
    common = (word for word, times in counts.most_common(most) if times >= fewest_times)
    return tuple(word for word in common if not _is_for_the_test(word))


def _is_for_the_test(word: str) -> bool:
    return any(part in word.lower() for part in NOT_TAUGHT)


Draw = Callable[[random.Random, Vocabulary], dict[str, str]]


@dataclasses.dataclass(frozen=True, slots=True)
class Family:
    """One relation. A question is one of `asks` with one of `answers`, or one of `sentences`, which
    say again what was told.
    """

    often: int
    draw: Draw
    statements: tuple[str, ...]
    asks: tuple[str, ...]
    answers: tuple[str, ...]
    sentences: tuple[str, ...]


def _name(rng: random.Random, words: Vocabulary) -> str:
    kind = rng.random()
    if kind < 0.45:
        return rng.choice(words.names)
    if kind < 0.85:
        return invented(rng)
    return f"{rng.choice(_MEN + _WOMEN)} {invented(rng)}"


def invented(rng: random.Random) -> str:
    """A name that nobody has."""
    while True:
        middle = "".join(rng.choice(_VOWELS) + rng.choice(_MIDDLES) for _ in range(rng.randint(1, 2)))
        name = f"{rng.choice(_ONSETS)}{middle}{rng.choice(_ENDINGS)}"
        if not _is_for_the_test(name):
            return name


def _noun(rng: random.Random, words: Vocabulary) -> str:
    return rng.choice(words.nouns)


def _number(rng: random.Random, most_digits: int = 6) -> str:
    digits = rng.randint(1, most_digits)
    number = rng.randrange(10 ** (digits - 1), 10**digits)
    return f"{number:,}" if number >= 1000 and rng.random() < 0.08 else str(number)


def _long_number(rng: random.Random) -> str:
    digits = rng.randint(2, 6)
    return str(rng.randrange(10 ** (digits - 1), 10**digits))


def plural(noun: str) -> str:
    """By rule."""
    if noun.endswith(("s", "x", "ch", "sh")):
        return f"{noun}es"
    return f"{noun[:-1]}ies" if noun.endswith("y") and noun[-2] not in "aeiou" else f"{noun}s"


def _person(rng: random.Random, words: Vocabulary) -> dict[str, str]:
    """`a` as a statement names somebody, `b` as a question does; pronouns; who asks."""
    is_man = rng.random() < 0.5
    first, last = rng.choice(_MEN if is_man else _WOMEN), _name(rng, words).split()[-1]
    match rng.randrange(5):
        case 0:
            a, b = f"{first} {last}", rng.choice((f"{first} {last}", first))
        case 1:
            a = b = f"{'Mr.' if is_man else 'Mrs.'} {last}"
        case 2:
            a = b = f"the {rng.choice(_ROLES_M if is_man else _ROLES_F)}"
        case 3:
            a = b = last
        case _:
            a = b = first
    pronouns = ("he", "his", "him") if is_man else ("she", "her", "her")
    asker = rng.choice((rng.choice(_MEN + _WOMEN), f"the {rng.choice(_ROLES_M + _ROLES_F)}", invented(rng), "somebody"))
    return {"a": a, "b": b, **dict(zip(("he", "his", "him"), pronouns, strict=True)), "asker": asker}


def _inflected(prefix: str, verb: Sequence[str]) -> dict[str, str]:
    return dict(zip((f"{prefix}_past", prefix, f"{prefix}_done"), verb, strict=True))


def _room(rng: random.Random, words: Vocabulary) -> dict[str, str]:
    room = rng.choice(_ROOMS) if rng.random() < 0.6 else _noun(rng, words)
    known = {"obj": _noun(rng, words), "place": room, "in": rng.choice(("in", "in", "into", "inside"))}
    return {**known, **_inflected("put", rng.choice(_PUT)), "value": _long_number(rng)}


def _count(rng: random.Random, words: Vocabulary) -> dict[str, str]:
    things = rng.choice(_COUNTABLE) if rng.random() < 0.4 else plural(_noun(rng, words))
    return {"things": things, "obj": _noun(rng, words), **_inflected("got", rng.choice(_GOT)), "value": _number(rng)}


def _numbered(rng: random.Random, words: Vocabulary) -> dict[str, str]:
    thing = rng.choice(_NUMBERED) if rng.random() < 0.5 else _noun(rng, words)
    happened = rng.choice(_HAPPENED)
    if rng.random() < 0.4:
        happened = f"{rng.choice(_DID)[0]} the {_noun(rng, words)}"
    return {"thing": thing, "happened": happened, "value": _long_number(rng)}


def _amount(rng: random.Random, words: Vocabulary) -> dict[str, str]:
    return {"obj": _noun(rng, words), "unit": rng.choice(_UNITS), "value": _number(rng, 5)}


def _year(rng: random.Random, words: Vocabulary) -> dict[str, str]:
    past, base, _ = rng.choice(_DID)
    with_object = f"{past} the {{o}}", f"{base} the {{o}}"
    journeys = ("went to {t}", "go to {t}"), ("left {t}", "leave {t}"), ("came to {t}", "come to {t}")
    deed = rng.choice((*journeys, with_object, with_object))
    town, obj = _name(rng, words), _noun(rng, words)
    did, do = (part.format(t=town, o=obj) for part in deed)
    return {"did": did, "do": do, "value": str(rng.randrange(1500, 2050))}


def _measure(rng: random.Random, words: Vocabulary) -> dict[str, str]:
    one, other, obj = _name(rng, words), _name(rng, words), _noun(rng, words)
    measures = (
        ("{one} lies {v} miles from {other}", "how far is it from {other} to {one}", "from {other} to {one} it is {v} miles"),
        ("{one} was {v} years old", "how old was {one}", "the age of {one} was {v}"),
        ("the {obj} weighed {v} pounds", "what did the {obj} weigh", "they weighed the {obj}, and it came to {v} pounds"),
        ("{one} walked {v} miles to {other}", "how far did {one} walk", "{one} had walked {v} miles"),
        ("the {obj} is {v} feet high", "how high is the {obj}", "the height of the {obj} is {v} feet"),
        ("it took {one} {v} hours to reach the {obj}", "how long did it take {one}", "{one} reached the {obj} after {v} hours"),
        ("the {obj} begins at {v}", "when does the {obj} begin", "the time of the {obj} is {v}"),
        ("{one} is to be found at number {v}", "at what number is {one}", "for {one} they asked at number {v}"),
    )  # fmt: skip
    stated, asked, again = (part.format(one=one, other=other, obj=obj, v=_STORED) for part in rng.choice(measures))
    return {"measured": stated, "measure": asked, "again": again, "value": _number(rng, 4)}


def _address(rng: random.Random, words: Vocabulary) -> dict[str, str]:
    street = f"{_name(rng, words).split()[-1]} {rng.choice(_STREETS)}"
    return {"street": street, "value": str(rng.randrange(2, 999))}


def _called(rng: random.Random, words: Vocabulary) -> dict[str, str]:
    relative, pronoun = rng.choice(_RELATIVES)
    return {"relative": relative, "r": pronoun, "value": _name(rng, words)}


def _doer(rng: random.Random, words: Vocabulary) -> dict[str, str]:
    return {"obj": _noun(rng, words), **_inflected("d", rng.choice(_DID)), "value": _name(rng, words)}


def _town(rng: random.Random, words: Vocabulary) -> dict[str, str]:
    return {"value": _name(rng, words), "trade": rng.choice(_TRADES)}


def _trade(rng: random.Random, words: Vocabulary) -> dict[str, str]:
    return {"value": rng.choice(_TRADES), "t": _name(rng, words)}


def _hidden(rng: random.Random, words: Vocabulary) -> dict[str, str]:
    known = {"obj": _noun(rng, words), "under": rng.choice(word_list("under behind beside near inside below above"))}
    return {**known, **_inflected("put", rng.choice(_PUT)), "value": _noun(rng, words)}


def _colour(rng: random.Random, words: Vocabulary) -> dict[str, str]:
    return {"obj": _noun(rng, words), "value": rng.choice(_COLOURS)}


_DRAWS: dict[str, Draw] = {
    "place": _room,
    "count": _count,
    "numbered": _numbered,
    "price": _amount,
    "year": _year,
    "measure": _measure,
    "address": _address,
    "called": _called,
    "mine": _called,
    "myself": _town,
    "home": _town,
    "town": _town,
    "trade": _trade,
    "doer": _doer,
    "hidden": _hidden,
    "colour": _colour,
}
FAMILIES = {
    name: Family(
        often=parts.pop("often"), draw=_DRAWS[name], **{kind: tuple(templates) for kind, templates in parts.items()}
    )
    for name, parts in tomllib.loads((Path(__file__).with_name("passing.toml")).read_text("utf-8")).items()
}
_OFTEN = tuple(family.often for family in FAMILIES.values())
_FIRST_PERSON = frozenset(("mine", "myself", "home"))
_MOST_QUESTIONS = 3
_HEARD = ("I see.", "Thank you.", "I shall remember it.", "Very well.", "Good.", "Yes.", "I will keep that in mind.")


@dataclasses.dataclass(frozen=True, slots=True)
class Mention:
    """`is_inline`: all are sentences of a paragraph that begin with a space; else paragraphs of their own, with the line
    breaks after them.
    """

    statement: Asked
    questions: tuple[Asked, ...]
    is_inline: bool


def make_mention(rng: random.Random, words: Vocabulary) -> Mention:
    """A statement, and one to three questions about it in the same setting."""
    name = rng.choices(tuple(FAMILIES), _OFTEN)[0]
    family = FAMILIES[name]
    fields = {**_person(rng, words), **family.draw(rng, words)}
    value = fields.pop("value")
    fields["value"] = _STORED
    setting = rng.choices(("inline", "paragraph", "chat"), (5, 4, 5 if name in _FIRST_PERSON else 1))[0]
    statement = _statement(rng, family, fields)
    questions = [_question(rng, family, fields, setting) for _ in range(rng.randint(1, _MOST_QUESTIONS))]
    if setting == "chat":
        statement = f"User: {statement}\n\nAssistant: {rng.choice(_HEARD)}"
    if rng.random() < 0.12:  # it is asked for at once
        statement = f"{statement}{' ' if setting == 'inline' else chr(10) * 2}{questions[0]}"
    before, after = (" ", "") if setting == "inline" else ("", "\n\n")
    stated, *asked = (_located(f"{before}{text}{after}", value) for text in (statement, *dict.fromkeys(questions)))
    statement_has = len(stated.answers) - 1  # what it tells first is not asked for
    return Mention(
        Asked(stated.text, stated.answers[-statement_has:] if statement_has else ()), tuple(asked), setting == "inline"
    )


def _statement(rng: random.Random, family: Family, fields: dict[str, str]) -> str:
    text = rng.choice(_LEADS) + _filled(
        rng.choice(family.statements), {**fields, "tail": _filled(rng.choice(_TAILS), fields)}
    )
    text = f"{_capital(text.rstrip(','))}."
    match rng.randrange(10):
        case 0:
            return f'"{text}"'
        case 1:
            return f'"{text[:-1]}," said {fields["asker"]}.'
        case _:
            return text


def _question(rng: random.Random, family: Family, fields: dict[str, str], setting: str) -> str:
    end = _filled(rng.choice(_ENDS), fields)
    if setting == "chat":
        asked, answered = rng.choice(family.asks), _capital(_filled(rng.choice(family.answers), fields))
        return f"User: {_capital(_filled(asked, fields))}\n\nAssistant: {answered}{'.' if rng.random() < 0.7 else end}"
    if rng.random() < 0.4:
        text = _capital(_filled(rng.choice(family.sentences), fields))
        return text if text.endswith('"') else text + end
    asked = _capital(_filled(rng.choice(family.asks), fields))
    answered = _capital(_filled(rng.choice(family.answers), fields)) + end
    frame = rng.choice(_FRAMES)
    if setting == "inline":
        frame = frame.replace("\n\n", " ").replace("\n", " ")
    return _capital(frame.replace("{asker}", fields["asker"]).replace("{asked}", asked).replace("{answered}", answered))


def _filled(template: str, fields: dict[str, str]) -> str:
    return template.format(**fields)


def _capital(text: str) -> str:
    """The first letter of `text` as a capital."""
    at = next((number for number, letter in enumerate(text) if letter.isalpha() or letter == _STORED), 0)
    return text[:at] + text[at : at + 1].upper() + text[at + 1 :]


def _located(text: str, value: str) -> Asked:
    """`text` with `value` where _STORED stands, as a sentence begins with a capital."""
    made, answers = "", []
    for number, part in enumerate(text.split(_STORED)):
        if number:
            begins = made.rstrip('" ').endswith((".", "?", "\n", ":", "-")) or not made.strip('" ')
            answers.append((len(made), len(made) + len(value)))
            made += value[:1].upper() + value[1:] if begins else value
        made += part
    return Asked(made, tuple(answers))
