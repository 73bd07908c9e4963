"""`nsm train`: the options of `python -m nsm_lab.training`."""

from __future__ import annotations

import typer

from service.cli.lab import lab_command


@lab_command()
def train(ctx: typer.Context) -> None:
    """Train a model on a corpus directory."""
    from nsm_lab.training.__main__ import parse
    from nsm_lab.training.loop import train as run
    from service.cli.forwarding import parsed
    from service.settings import load_settings

    load_settings()  # refuses misspelt variables
    print(f"model written to {run(parsed(parse, ctx.args))}")
