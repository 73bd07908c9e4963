"""The root of the commands of `nsm`, and its options."""

from __future__ import annotations

from typing import Annotated

import typer

from nsm_core.distribution import version_of
from service.cli.group import Commands


def new_root() -> typer.Typer:
    """Without commands."""
    root = typer.Typer(
        cls=Commands,
        help="Recurrent language models whose conversations are small, durable states.",
        pretty_exceptions_enable=False,
        rich_markup_mode=None,  # in its table names of options are cut
    )
    root.callback()(_options)
    return root


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        print(f"nsm {version_of()}")
        raise typer.Exit


def _options(
    debug: Annotated[bool, typer.Option("--debug", help="Show where an error came from.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """`debug` is read by `Commands`."""
