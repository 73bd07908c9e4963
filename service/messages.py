"""Texts of refusals: messages for pydantic's validation errors, and names as clients gave them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

HINT_CUTOFF = 0.8  # of difflib: a hint names a misspelt field, not one that shares some letters

MESSAGES: Mapping[str, str] = {
    "missing": "is required",
    "extra_forbidden": "is an unknown field",
    "int_type": "must be an integer",
    "int_parsing": "must be an integer",
    "int_parsing_size": "must be an integer",
    "int_from_float": "must be an integer",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "finite_number": "must be a finite number",
    "bool_type": "must be a boolean (true or false)",
    "bool_parsing": "must be a boolean (true or false)",
    "string_type": "must be a string",
    "list_type": "must be a list",
    "dict_type": "must be a JSON object",
    "model_type": "must be a JSON object",
    "model_attributes_type": "must be a JSON object",
    "greater_than": "must be above {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be below {lt}",
    "less_than_equal": "must be at most {le}",
    "too_short": "must have at least {min_length} {entries}",
    "too_long": "must have at most {max_length} {entries}",
    "string_pattern_mismatch": "must match the pattern {pattern}",
    "string_too_short": "must have at least {min_length} characters",
    "string_too_long": "must have at most {max_length} characters",
}
BOUNDS = ("greater_than", "greater_than_equal", "less_than", "less_than_equal")  # NaN is within none


def quoted(name: str, most: int = 80) -> str:
    """A name for a message; a long one is cut, and shows that it was."""
    return repr(name) if len(name) <= most else f"{name[:most]!r}…"


def validation_message(error: Mapping[str, Any]) -> str:
    """The message for one of `ValidationError.errors()`; it follows the field's name."""
    kind = "finite_number" if error["type"] in BOUNDS and _is_nan(error.get("input")) else error["type"]
    template = MESSAGES.get(kind)
    if template is not None:
        context = {name: _number(value) for name, value in error.get("ctx", {}).items()}
        is_one = 1 in (context.get("min_length"), context.get("max_length"))
        return template.format(**context, entries="entry" if is_one else "entries")
    return str(error["msg"]).removeprefix("Value error, ").replace("Input should", "must", 1)


def wrong_length(error: Mapping[str, Any]) -> int | None:
    """The length of a value that is too long or too short; None for any other error."""
    if error["type"] not in ("too_short", "too_long", "string_too_short", "string_too_long"):
        return None
    value = error.get("input")
    return len(value) if isinstance(value, str | list | dict) else None


def _is_nan(value: object) -> bool:
    """Also as text, of which settings and options come."""
    try:
        return isinstance(value, str | float) and math.isnan(float(value))
    except ValueError:
        return False


def _number(value: object) -> object:
    return f"{value:.16g}" if isinstance(value, float) else value
