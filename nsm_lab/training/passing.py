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
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

NOT_TAUGHT = ("pass", "key", "locker", "parcel", "barrel", "convoy", "admiral", "ticket", "motor", "oil")
_STORED = "\x00"  # stands for the value until its place is known
MOST_NOUNS, MOST_NAMES, FEWEST_TIMES = 5000, 4000, 12
_NOUN = re.compile(r"\bthe ([a-z]{3,11})\b")
_NAME = re.compile(r"[a-z,;] ([A-Z][a-z]{2,10})\b")


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def _lines(text: str) -> tuple[str, ...]:
    return tuple(line.strip() for line in text.strip().splitlines())


_NO_NAMES = frozenset(
    _words(
        "The This That And But Mr Mrs Miss Sir God Lord Lady English French German American January February "
        "March April May June July August September October November December Sunday Monday Tuesday Wednesday "
        "Thursday Friday Saturday Dr Captain Christmas Christian What How Why Who When Where Yes You They "
        "There"
    )
)
_MEN = _words(
    "Arthur Bernard Cecil Daniel Edmund Frederick George Henry Jasper Laurence Martin Oliver Philip Roger Tom"
)
_WOMEN = _words(
    "Alice Beatrice Caroline Dorothy Edith Florence Grace Harriet Isabel Kate Lucy Nora Phoebe Rachel Ursula"
)
_ROLES_M = _words("captain cook porter doctor clerk priest gardener soldier butler uncle farmer merchant boy miller")
_ROLES_F = _words("widow nurse governess aunt maid girl duchess landlady actress seamstress")
_ONSETS = _words("B Br C Cr D Dr F Fl G Gr H J K L M N P Pr R S St T Th Tr V W")
_VOWELS = _words("a e i o u ai ea oo")
_MIDDLES = _words("d l ll m n nd r rn rt s ss st t v w ck g b")
_ENDINGS = _words("a by den el er ford ham ia ine is ley mund na on or ow ric ster ton us well wick")
_PLACES = _words(
    "room cabin cell drawer shelf box berth ward stall platform vault pew bin cupboard chest house hut tent office "
    "carriage bed cellar corridor gate pier bench desk row floor chapter page bay hall stable"
)
_NUMBERED = _words(
    "engine coach company tram cab boat horse mill pump wagon battery hut ship tower gun raft balloon bus prisoner "
    "platoon station number house sledge runner dog cage machine van bell"
)
_COUNTABLE = _words(
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
    tuple(forms.split("/"))
    for forms in _words(
        "put/put/put hid/hide/hidden left/leave/left laid/lay/laid kept/keep/kept stored/store/stored dropped/drop/dropped "
        "placed/place/placed forgot/forget/forgotten found/find/found saw/see/seen locked/lock/locked lost/lose/lost"
    )
)
_GOT = tuple(
    tuple(forms.split("/"))
    for forms in _words(
        "bought/buy/bought sold/sell/sold counted/count/counted brought/bring/brought sent/send/sent ordered/order/ordered "
        "took/take/taken found/find/found kept/keep/kept saw/see/seen lost/lose/lost stole/steal/stolen made/make/made "
        "carried/carry/carried owned/own/owned gathered/gather/gathered burned/burn/burned painted/paint/painted"
    )
)
_DID = tuple(
    tuple(forms.split("/"))
    for forms in _words(
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
    for pair in _words(
        "brother/he sister/she father/he mother/she uncle/he aunt/she son/he daughter/she cousin/he friend/he wife/she "
        "husband/he dog/he cat/she horse/he parrot/he teacher/she neighbour/he cook/she servant/he master/he pony/he "
        "partner/he niece/she nephew/he grandfather/he grandmother/she doctor/he boat/she"
    )
)
_COLOURS = _words(
    "black white red green blue grey brown yellow scarlet violet silver golden crimson pink purple orange"
)
_TRADES = _words(
    "baker lawyer sailor painter tailor doctor printer miller soldier teacher banker gardener smith clerk carpenter "
    "barber chemist fisherman shepherd musician surgeon weaver mason butcher pilot judge poet nurse"
)
_UNITS = _words("pounds shillings guineas dollars francs crowns florins roubles")
_STREETS = _words("Street Road Lane Square Avenue Terrace Row Gardens")


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
            _usable(nouns, MOST_NOUNS, fewest_times) or _PLACES,
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
    """One relation. `told`: statements. A question is one of `asks` with one of `answers`, or one of `sentences`, which
    say again what was told.
    """

    often: int
    draw: Draw
    told: tuple[str, ...]
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


def _forms(prefix: str, forms: Sequence[str]) -> dict[str, str]:
    return dict(zip((f"{prefix}_past", prefix, f"{prefix}_done"), forms, strict=True))


def _place(rng: random.Random, words: Vocabulary) -> dict[str, str]:
    place = rng.choice(_PLACES) if rng.random() < 0.6 else _noun(rng, words)
    known = {"obj": _noun(rng, words), "place": place, "in": rng.choice(("in", "in", "into", "inside"))}
    return {**known, **_forms("put", rng.choice(_PUT)), "value": _long_number(rng)}


def _count(rng: random.Random, words: Vocabulary) -> dict[str, str]:
    things = rng.choice(_COUNTABLE) if rng.random() < 0.4 else plural(_noun(rng, words))
    return {"things": things, "obj": _noun(rng, words), **_forms("got", rng.choice(_GOT)), "value": _number(rng)}


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
    deed = rng.choice(
        (("went to {t}", "go to {t}"), ("left {t}", "leave {t}"), ("came to {t}", "come to {t}"), ("", ""), ("", ""))
    )
    town, obj = _name(rng, words), _noun(rng, words)
    if not deed[0]:
        deed = f"{past} the {obj}", f"{base} the {obj}"
    return {
        "did": deed[0].format(t=town),
        "do": deed[1].format(t=town),
        "value": str(rng.randrange(1500, 2050)),
    }


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
    told, asked, again = (part.format(one=one, other=other, obj=obj, v=_STORED) for part in rng.choice(measures))
    return {"measured": told, "measure": asked, "again": again, "value": _number(rng, 4)}


def _address(rng: random.Random, words: Vocabulary) -> dict[str, str]:
    street = f"{_name(rng, words).split()[-1]} {rng.choice(_STREETS)}"
    return {"street": street, "value": str(rng.randrange(2, 999))}


def _called(rng: random.Random, words: Vocabulary) -> dict[str, str]:
    relative, pronoun = rng.choice(_RELATIVES)
    return {"relative": relative, "r": pronoun, "value": _name(rng, words)}


def _doer(rng: random.Random, words: Vocabulary) -> dict[str, str]:
    return {"obj": _noun(rng, words), **_forms("d", rng.choice(_DID)), "value": _name(rng, words)}


def _town(rng: random.Random, words: Vocabulary) -> dict[str, str]:
    return {"value": _name(rng, words), "trade": rng.choice(_TRADES)}


def _trade(rng: random.Random, words: Vocabulary) -> dict[str, str]:
    return {"value": rng.choice(_TRADES), "t": _name(rng, words)}


def _hidden(rng: random.Random, words: Vocabulary) -> dict[str, str]:
    known = {"obj": _noun(rng, words), "under": rng.choice(_words("under behind beside near inside below above"))}
    return {**known, **_forms("put", rng.choice(_PUT)), "value": _noun(rng, words)}


def _colour(rng: random.Random, words: Vocabulary) -> dict[str, str]:
    return {"obj": _noun(rng, words), "value": rng.choice(_COLOURS)}


_IT = ("{value}", "It was {value}", "{value}, I think", "It must have been {value}", "That was {value}")

FAMILIES = {
    "place": Family(
        4, _place,
        _lines("""{a} {put_past} the {obj} {in} {place} {value}{tail}
        the {obj} was {put_done} in {place} {value}{tail}
        it was in {place} {value} that {a} {put_past} the {obj}{tail}
        in {place} {value} {a} {put_past} the {obj}{tail}
        {a} had the {obj} with {him} and {put_past} it {in} {place} {value}{tail}
        the {obj} lay in {place} {value}, where {a} had {put_done} it
        if anybody wants the {obj}, it is in {place} {value}{tail}
        {place} {value} is where {a} {put_past} the {obj}{tail}
        {a} told me: I {put_past} the {obj} in {place} {value}{tail}
        {a} went up to {place} {value} and there {he} {put_past} the {obj}{tail}
        nobody looked for the {obj} in {place} {value}, where {a} {put_past} it{tail}"""),
        _lines("""Where did {b} {put} the {obj}?
        In which {place} was the {obj}?
        Which {place} had the {obj} in it?
        Where was the {obj}?
        What was the number of the {place} where {b} {put_past} the {obj}?
        In what {place} did {b} {put} the {obj}?
        Do you know where the {obj} is?"""),
        _lines("""In {place} {value}
        It was in {place} {value}
        {b} {put_past} it in {place} {value}
        It is in {place} {value}
        {place} {value}
        {value}
        You will find it in {place} {value}"""),
        _lines("""{b} wanted the {obj} again and went to {place} {value}
        {b} looked for the {obj} in {place} {value}
        the {obj} was still in {place} {value}
        somebody asked for the {obj}, and {b} pointed to {place} {value}
        to fetch the {obj} {b} went back to {place} {value}
        they sent for the {obj}. It was brought from {place} {value}
        {b} remembered the {obj}. It lay in {place} {value}
        the number of the {place} with the {obj} was {value}
        once more {b} stood before {place} {value}
        the {place} in which {b} {put_past} the {obj} was number {value}"""),
    ),
    "count": Family(
        4, _count,
        _lines("""{a} {got_past} {value} {things}{tail}
        there were {value} {things} in the {obj}{tail}
        the {obj} held {value} {things}{tail}
        {value} {things} were {got_done} by {a}{tail}
        of {things} {a} had {value}{tail}
        with {value} {things} {a} set out{tail}
        {a}, who {got_past} {value} {things}, was content
        {a} told me that {he} {got_past} {value} {things}{tail}
        no fewer than {value} {things} stood before the {obj}{tail}
        {a} wrote that {he} {got_past} {value} {things}{tail}
        in the {obj} {a} {got_past} {value} {things}{tail}
        it took {value} {things} to fill the {obj}{tail}"""),
        _lines("""How many {things} did {b} {got}?
        How many {things} were there?
        How many {things} were there in all?
        What number of {things} was it?
        How many {things}?
        How many {things} had been {got_done}?
        And the {things}, how many?"""),
        _lines("""{value}
        There were {value}
        There were {value} {things}
        {b} {got_past} {value}
        {b} {got_past} {value} {things}
        It was {value}
        {value} {things}
        In all {value}
        {value} of them"""),
        _lines("""the number of {things} was {value}
        {b} was asked about the {things}, and said that there were {value}
        {b} spoke of the {things}, {value} in all
        they counted the {things} again and found {value}
        {b} thought of the {things}. There were {value} of them
        of the {things} that {b} {got_past} there were {value}
        everybody knew that {b} had {value} {things}
        the {things} were still there, all {value}
        as for the {things}, {b} {got_past} {value}"""),
    ),
    "numbered": Family(
        4, _numbered,
        _lines("""{thing} {value} {happened}{tail}
        it was {thing} {value} that {happened}{tail}
        {a} saw {thing} {value}, which {happened}
        they say that {thing} {value} {happened}{tail}
        the {thing} that {happened} bore the number {value}
        among them was {thing} {value}, and it {happened}{tail}
        {thing} number {value} {happened}{tail}
        {a} knew that {thing} {value} {happened}{tail}
        of all the {thing}s only {thing} {value} {happened}
        No. {value}, a {thing}, {happened}{tail}"""),
        _lines("""Which {thing} {happened}?
        What {thing} was it that {happened}?
        What was the number of the {thing} that {happened}?
        Do you recall which {thing} {happened}?
        Which of them {happened}?"""),
        _lines("""{thing} {value}
        It was {thing} {value}
        {value}
        It was number {value}
        The {thing} was number {value}
        That was {thing} {value}
        {thing} {value} did
        Number {value}"""),
        _lines("""the {thing} that {happened} was number {value}
        the {thing} which {happened} was {thing} {value}
        the number of the {thing} that {happened} was {value}
        the one that {happened} was {thing} {value}
        {b} spoke of the {thing} that {happened}. Its number was {value}
        they remembered the {thing} that {happened}, number {value}
        upon the {thing} that {happened} stood the number {value}
        for the {thing} that {happened} they wrote down {value}"""),
    ),
    "price": Family(
        2, _amount,
        _lines("""{a} paid {value} {unit} for the {obj}{tail}
        the {obj} cost {a} {value} {unit}{tail}
        {a} sold the {obj} for {value} {unit}{tail}
        for the {obj} they asked {value} {unit}{tail}
        {value} {unit} was what the {obj} cost{tail}
        {a} owed {value} {unit} for the {obj}
        with {value} {unit} {a} bought the {obj}{tail}"""),
        _lines("""What did {b} pay for the {obj}?
        How much was the {obj}?
        What did the {obj} cost?
        How much money was it for the {obj}?
        How many {unit} was the {obj}?"""),
        _lines("""{value} {unit}
        It cost {value} {unit}
        {value}
        It was {value} {unit}
        {b} gave {value} {unit} for it
        It came to {value} {unit}"""),
        _lines("""the {obj} cost {value} {unit}
        the price of the {obj} was {value} {unit}
        {b} counted out the money for the {obj}, {value} {unit}
        {b} thought the {obj} dear at {value} {unit}
        the {obj} was worth {value} {unit}"""),
    ),
    "year": Family(
        2, _year,
        _lines("""in {value} {a} {did}{tail}
        {a} {did} in {value}{tail}
        {a} was born in {value} and {did} as a child
        it was in the year {value} that {a} {did}
        the year was {value} when {a} {did}
        when {a} {did}, in {value}, nobody was surprised"""),
        _lines("""When did {b} {do}?
        In which year did {b} {do}?
        In what year was it that {b} {did}?
        What was the year in which {b} {did}?"""),
        _lines("""In {value}
        It was in {value}
        {value}
        That was in {value}
        {b} {did} in {value}
        It was the year {value}"""),
        _lines("""{b} {did} in the year {value}
        the year in which {b} {did} was {value}
        since {value}, when {b} {did}, much has changed
        {b} spoke of {value}, the year in which {he} {did}
        it was {value} when {b} {did}"""),
    ),
    "measure": Family(
        3, _measure,
        _lines("""{measured}{tail}
        {a} told me that {measured}
        as {a} wrote, {measured}{tail}"""),
        _lines("""{measure}?
        {measure}, do you know?
        tell me, {measure}?"""),
        _IT,
        _lines("""{again}
        {b} remembered that {again}
        in truth {again}"""),
    ),
    "address": Family(
        1, _address,
        _lines("""{a} lives at {value} {street}{tail}
        the house of {a} is number {value}, {street}
        {a} has moved to {value} {street}{tail}
        write to {a} at {value} {street}
        {a} has taken rooms in {street}, at number {value}{tail}"""),
        _lines("""Where does {b} live?
        At what number does {b} live?
        Which house in {street} is it?
        Have you the address of {b}?"""),
        _lines("""At {value} {street}
        {value} {street}
        {b} lives at {value} {street}
        In {street}, at number {value}
        Number {value}"""),
        _lines("""{b}'s house in {street} was number {value}
        to find {b} they went to number {value}
        the number of {b}'s house was {value}
        they stopped before {b}'s door, number {value}"""),
    ),
    "called": Family(
        4, _called,
        _lines("""{a} had a {relative} called {value}{tail}
        the name of {a}'s {relative} was {value}
        {a}'s {relative} was called {value}
        {a}'s {relative}, {value}, came too{tail}
        {value}, the {relative} of {a}, was there{tail}
        {a} named {his} {relative} {value}
        {a} came with {his} {relative} {value}{tail}
        everybody liked {value}, {a}'s {relative}"""),
        _lines("""What was {b}'s {relative} called?
        What was the name of {b}'s {relative}?
        Who was {b}'s {relative}?
        How did {b} call {his} {relative}?
        What name had {b}'s {relative}?
        And {b}'s {relative}, who was that?"""),
        _lines("""{value}
        It was {value}
        The name was {value}
        {b}'s {relative} was called {value}
        {b}'s {relative} was {value}
        That was {value}"""),
        _lines("""{b}'s {relative} was called {value}
        {b} spoke of {his} {relative}, {value}
        {b} called to {his} {relative}: "{value}!"
        the {relative} of {b} bore the name of {value}
        {b} thought of {his} {relative} {value}
        for {b}'s {relative} there was only one name, {value}"""),
    ),
    "mine": Family(
        5, _called,
        _lines("""my {relative} is called {value}
        my {relative}'s name is {value}
        I have a {relative} called {value}
        {value} is my {relative}
        the name of my {relative} is {value}
        I am here with my {relative} {value}
        my {relative} {value} sends you greetings
        we call my {relative} {value}"""),
        _lines("""What is my {relative} called?
        What is my {relative}'s name?
        Who is my {relative}?
        Do you know my {relative}'s name?
        How is my {relative} called?
        What was my {relative}'s name again?"""),
        _lines("""{value}
        Your {relative} is called {value}
        Your {relative}'s name is {value}
        It is {value}
        The name of your {relative} is {value}
        {value} is your {relative}"""),
        _lines("""my {relative}, as I said, is called {value}
        I told you of my {relative}, {value}
        you know the name of my {relative}: {value}
        my {relative}'s name was {value}"""),
    ),
    "myself": Family(
        4, _town,
        _lines("""my name is {value}
        I am {value}
        I am called {value}
        they call me {value}
        you may call me {value}
        my name is {value}, and I am a {trade}"""),
        _lines("""What is my name?
        Who am I?
        What am I called?
        Do you know my name?
        Do you remember what I am called?
        What was my name again?
        Tell me my name."""),
        _lines("""{value}
        Your name is {value}
        You are {value}
        You are called {value}
        It is {value}
        Your name, as you said, is {value}"""),
        _lines("""my name, as I said, is {value}
        I have told you my name. It is {value}
        you have not forgotten my name, {value}
        once more: I am {value}"""),
    ),
    "home": Family(
        3, _town,
        _lines("""I live in {value}
        my home is in {value}
        I come from {value}
        I was born in {value}
        I am a {trade} from {value}"""),
        _lines("""Where do I live?
        Where do I come from?
        Where is my home?
        Do you know where I live?
        In which town do I live?
        What town did I name?"""),
        _lines("""{value}
        You live in {value}
        In {value}
        You come from {value}
        Your home is {value}
        It is {value}"""),
        _lines("""I come, as I said, from {value}
        my home, you know, is {value}
        I was thinking of {value}"""),
    ),
    "town": Family(
        3, _town,
        _lines("""{a} lives in {value}{tail}
        {a} was a {trade} in {value}
        {a} came from {value}{tail}
        {a} went to {value}{tail}
        {a} sailed for {value}{tail}
        in {value} {a} had worked as a {trade}
        {a}, a {trade} of {value}, was there{tail}
        the home of {a} was {value}"""),
        _lines("""Where did {b} come from?
        Where does {b} live?
        Where did {b} go?
        Which town was it, with {b}?
        What place was that of {b}'s?"""),
        _lines("""{value}
        It was {value}
        {b} came from {value}
        From {value}
        {b} lives in {value}
        In {value}"""),
        _lines("""{b} had often spoken of {value}
        {b} thought of {value}
        the town that {b} knew best was {value}
        one day {b} went back to {value}
        {b} longed for {value}"""),
    ),
    "trade": Family(
        1, _trade,
        _lines("""{a} is a {value}{tail}
        {a} worked as a {value} in {t}{tail}
        {a}, the {value}, came from {t}
        in {t} {a} had been a {value}"""),
        _lines("""What was {b}'s trade?
        How did {b} earn a living?
        What sort of work did {b} do?"""),
        _lines("""A {value}
        {b} was a {value}
        The trade of a {value}
        As a {value}"""),
        _lines("""{b} had always been a {value}
        {b}, as a {value}, knew about such things
        as a good {value} {b} was up early"""),
    ),
    "doer": Family(
        3, _doer,
        _lines("""{value} {d_past} the {obj}{tail}
        the {obj} was {d_done} by {value}{tail}
        it was {value} who {d_past} the {obj}{tail}
        the man who {d_past} the {obj} was called {value}
        nobody but {value} could have {d_done} the {obj}
        {value}, not {a}, {d_past} the {obj}{tail}
        we all saw how {value} {d_past} the {obj}"""),
        _lines("""Who {d_past} the {obj}?
        Who was it that {d_past} the {obj}?
        By whom was the {obj} {d_done}?
        Do you know who {d_past} the {obj}?
        Which of them {d_past} the {obj}?"""),
        _lines("""{value}
        It was {value}
        {value} {d_past} it
        {value} did
        The {obj} was {d_done} by {value}
        It was {d_done} by {value}"""),
        _lines("""the {obj} had been {d_done} by {value}
        the one who {d_past} the {obj} was {value}
        they blamed {value}
        for the {obj} they had to thank {value}
        the name of him who {d_past} the {obj} was {value}"""),
    ),
    "hidden": Family(
        3, _hidden,
        _lines("""{a} {put_past} the {obj} {under} the {value}{tail}
        the {obj} was {put_done} {under} the {value}{tail}
        {under} the {value} {a} {put_past} the {obj}{tail}
        it was {under} the {value} that {a} {put_past} the {obj}{tail}
        {a} told me that the {obj} was {under} the {value}{tail}
        the {obj} is {under} the {value}, where {a} {put_past} it"""),
        _lines("""Where did {b} {put} the {obj}?
        Where was the {obj}?
        Where is the {obj}?
        Do you know where the {obj} was {put_done}?"""),
        _lines("""{under} the {value}
        It was {under} the {value}
        {b} {put_past} it {under} the {value}
        It is {under} the {value}"""),
        _lines("""the {obj} was still {under} the {value}
        {b} looked for the {obj} {under} the {value}
        the {obj} was found {under} the {value}
        to get the {obj} they searched {under} the {value}"""),
    ),
    "colour": Family(
        1, _colour,
        _lines("""the {obj} was {value}{tail}
        {a} painted the {obj} {value}{tail}
        {a} had a {value} {obj}{tail}
        a {value} {obj} stood there{tail}"""),
        _lines("""What colour was the {obj}?
        Of what colour was the {obj}?
        How did the {obj} look?"""),
        _lines("""{value}
        It was {value}
        The {obj} was {value}
        A {value} one"""),
        _lines("""the {obj}, you remember, was {value}
        {b} knew the {obj} at once, for it was {value}
        they spoke of the {obj} again, which was {value}"""),
    ),
}  # fmt: skip
_FAMILIES, _OFTEN = tuple(FAMILIES.values()), tuple(family.often for family in FAMILIES.values())
_FIRST_PERSON = frozenset(("mine", "myself", "home"))
_MOST_QUESTIONS = 3
_HEARD = ("I see.", "Thank you.", "I shall remember it.", "Very well.", "Good.", "Yes.", "I will keep that in mind.")


@dataclasses.dataclass(frozen=True, slots=True)
class Asked:
    """A text and where in it what was told stands, [from, to) in characters."""

    text: str
    answers: tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Told:
    """`is_inline`: all are sentences of a paragraph that begin with a space; else paragraphs of their own, with the line
    breaks after them.
    """

    statement: Asked
    questions: tuple[Asked, ...]
    is_inline: bool


def make_told(rng: random.Random, words: Vocabulary) -> Told:
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
    told, *asked = (_located(f"{before}{text}{after}", value) for text in (statement, *dict.fromkeys(questions)))
    statement_has = len(told.answers) - 1  # what it tells first is not asked for
    return Told(
        Asked(told.text, told.answers[-statement_has:] if statement_has else ()), tuple(asked), setting == "inline"
    )


def _statement(rng: random.Random, family: Family, fields: dict[str, str]) -> str:
    text = rng.choice(_LEADS) + _filled(
        rng.choice(family.told), {**fields, "tail": _filled(rng.choice(_TAILS), fields)}
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
