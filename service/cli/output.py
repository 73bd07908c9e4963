"""Terminal output: a model's text, notes on standard error, JSON, tables."""

from __future__ import annotations

import datetime
import json
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import typer

if TYPE_CHECKING:
    from rich.console import Console

Item = TypeVar("Item")
PIPE_COLUMNS = 200  # a table that no terminal shows need not be cut to the width of one

# A model or a client may write anything, and a terminal obeys escape sequences: it gets to see U+FFFD instead.
_CONTROLS = {code: "\ufffd" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}


def write_text(text: str) -> None:
    """Text of a model or a client, to standard output, at once; as it is, unless a terminal shows it."""
    sys.stdout.write(printable(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def note(text: str) -> None:
    """Something about the text, to standard error: standard output holds the text alone."""
    typer.secho(printable(text), err=True, dim=True)


def printable(text: str) -> str:
    """`text` without control sequences."""
    return text.translate(_CONTROLS)


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False))


def print_list(
    items: list[Item], *, as_json: bool, fields: Callable[[Item], Any], table: Callable[[list[Item]], None], none: str
) -> None:
    """As JSON of each one's `fields`, or as a `table`; `none`: the words for an empty list."""
    if as_json:
        print_json([fields(item) for item in items])
    elif items:
        table(items)
    else:
        print(none)


def print_fields(fields: Mapping[str, str]) -> None:
    """Names and values, one pair a line; further lines of a value stand below its first."""
    width = max(map(len, fields)) + 2
    for name, value in fields.items():
        print(printable(name).ljust(width) + printable(value).replace("\n", "\n" + " " * width))


def local_time(unix_s: float) -> str:
    """Date and time of day where the command runs."""
    return datetime.datetime.fromtimestamp(unix_s).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def console() -> Console:
    """Standard output for tables."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else PIPE_COLUMNS, highlight=False, markup=False)
