"""Values of a JSON object, checked one by one: every refusal names the field, the expected value and the given one."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from nsm_core.sampling.counts import MAX_TOKEN_COUNT
from nsm_core.sampling.params import seed_bits, top_k_count
from nsm_core.wire.tensors import MAX_SHOWN_CHARS, OPTIONS, refuse

Parser = Callable[[str, Any], Any]
MAX_TOKEN_ID = 2**31 - 1  # ids cross as INT32
MAX_ID_DIGITS = 10


def whole_number(name: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        refuse(name, "a whole number", value)
    return value


def seed(name: str, value: Any) -> int:
    return seed_bits(whole_number(name, value))


def top_k(name: str, value: Any) -> int:
    return top_k_count(whole_number(name, value))


def number(name: str, value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        refuse(name, "a number", value)
    try:
        return float(value)
    except OverflowError:  # JSON has whole numbers of any length
        refuse(name, "a number", value)


def positive_number(name: str, value: Any) -> float:
    seconds = number(name, value)
    if not 0 < seconds < math.inf:
        refuse(name, "a number above 0", value)
    return seconds


def flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        refuse(name, "true or false", value)
    return value


def text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        refuse(name, "a string", value)
    return value


def optional(parser: Parser) -> Parser:
    """null passes."""
    return lambda name, value: None if value is None else parser(name, value)


def texts(name: str, value: Any) -> tuple[str, ...]:
    """One string, or a list of them."""
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        refuse(name, "a string or a list of strings", value)
    return tuple(value)


def whole_numbers(name: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(isinstance(item, int) and not isinstance(item, bool) for item in value):
        refuse(name, "a list of whole numbers", value)
    return tuple(value)


def token_counts(name: str, value: Any) -> dict[int, int]:
    """[[token id, count], …] with counts in [1, MAX_TOKEN_COUNT] and every id once."""
    if not isinstance(value, list) or not all(_is_pair(item) for item in value):
        refuse(name, f"a list of [token id, count], each count in [1, {MAX_TOKEN_COUNT}]", value)
    counts = dict(value)
    if len(counts) != len(value):
        refuse(name, "a list that names each token id once", value)
    return counts


def token_biases(name: str, value: Any) -> dict[int, float]:
    """{"token id": bias, …}: JSON has no other keys than strings."""
    if not isinstance(value, dict) or not all(_is_token_id(key) for key in value):
        refuse(name, "an object of token ids and numbers", value)
    return {int(key): number(name, bias) for key, bias in value.items()}


def parse(fields: Mapping[str, Any], parsers: Mapping[str, Parser], *, within: str = "") -> dict[str, Any]:
    """Every field through its parser; an unknown one is refused: a misspelt option must not run with its default."""
    unknown = sorted(set(fields) - set(parsers))
    if unknown:
        _refuse_unknown(unknown[0], fields[unknown[0]], parsers, within)
    return {name: parsers[name](f"{within}{name}", value) for name, value in fields.items()}


def _refuse_unknown(name: str, value: Any, parsers: Mapping[str, Parser], within: str) -> NoReturn:
    if not name:
        refuse(within.removesuffix(".") or OPTIONS, "an object whose fields have names", {name: value})
    expected = f"one of {', '.join(sorted(parsers))}" if parsers else "left out, as this operation takes no such option"
    refuse(f"{within}{name[:MAX_SHOWN_CHARS]}", expected, value)


def _is_token_id(key: str) -> bool:
    return key.isascii() and key.isdigit() and len(key) <= MAX_ID_DIGITS


def _is_pair(item: object) -> bool:
    if not isinstance(item, list) or len(item) != 2:
        return False
    token_id, count = item
    are_whole = all(isinstance(value, int) and not isinstance(value, bool) for value in item)
    return are_whole and 0 <= token_id <= MAX_TOKEN_ID and 1 <= count <= MAX_TOKEN_COUNT
