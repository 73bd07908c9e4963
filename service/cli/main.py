"""The `nsm` command."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence

import typer

INTERRUPTED = 130  # 128 and the number of SIGINT, as shells report it


def main() -> None:
    """The console script."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a locale without some letter is no reason to stop in mid-text
    try:
        app = app_for(sys.argv[1:])
    except KeyboardInterrupt:  # while modules are imported; later the commands see to it
        raise SystemExit(INTERRUPTED) from None
    app()


def app_for(args: Sequence[str]) -> typer.Typer:
    """All commands, or `serve` alone if that is meant: a server need not wait for what the others import."""
    if args[:1] == ["serve"]:
        from service.cli.root import new_root
        from service.cli.serve import serve

        app = new_root()
        app.command()(serve)
        return app
    from service.cli.commands import app

    return app
