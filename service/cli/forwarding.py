"""Commands whose options belong to another parser."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Sequence
from typing import TypeVar

import typer

Config = TypeVar("Config")


class WrongUsage(typer.TyperException):
    """An error of argparse."""

    exit_code = 2


def parsed(parse: Callable[[Sequence[str]], Config], argv: Sequence[str]) -> Config:
    """`parse(argv)`; argparse's usage error becomes one line."""
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            return parse(argv)
    except SystemExit as error:
        if not error.code:  # it printed its help
            raise typer.Exit from error
        raise WrongUsage(complaint.getvalue().strip().rpartition("error: ")[2]) from error
