"""The `nsm` command. Torch and the web framework are imported by the commands that need them: help is instant."""

from __future__ import annotations

import io
import sys
from typing import Annotated

import typer

from nsm_core.distribution import version_of
from service.cli import batches, bench, keys, model, named_states, repair, sessions, states, transfer, triton
from service.cli.chat import chat
from service.cli.evaluate import evaluate
from service.cli.export import export
from service.cli.generate import generate
from service.cli.group import Commands
from service.cli.info import info
from service.cli.inspect import inspect
from service.cli.serve import serve
from service.cli.tier import tier
from service.cli.top import top
from service.cli.train import train
from service.cli.tune import tune

FORWARD = {"ignore_unknown_options": True, "allow_extra_args": True}

app = typer.Typer(
    cls=Commands,
    help="Recurrent language models whose conversations are small, durable states.",
    pretty_exceptions_enable=False,
)


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        print(f"nsm {version_of()}")
        raise typer.Exit


@app.callback()
def _root(
    debug: Annotated[bool, typer.Option("--debug", help="Show where an error came from.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """`debug` is read by `Commands`."""


app.command()(serve)
app.command()(generate)
app.command()(chat)
app.command()(tune)
for command in (states.states, transfer.backup, transfer.restore, transfer.copy, repair.verify, repair.migrate):
    sessions.app.command()(command)
app.add_typer(sessions.app, name="sessions")
app.add_typer(named_states.app, name="states")
app.add_typer(batches.app, name="batches")
app.add_typer(keys.app, name="keys")
app.add_typer(model.app, name="model")
app.add_typer(triton.app, name="triton")
app.add_typer(bench.app, name="bench")
app.command(context_settings=FORWARD, add_help_option=False)(train)
app.command("eval", context_settings=FORWARD, add_help_option=False)(evaluate)
app.command()(inspect)
app.command()(export)
app.command()(tier)
app.command()(top)
app.command()(info)


def main() -> None:
    """The console script."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a locale without some letter is no reason to stop in mid-text
    app()
