"""All commands of `nsm`. Torch and the web framework are imported by those that need them: help is instant."""

from __future__ import annotations

from service.cli import batches, bench, keys, model, named_states, repair, sessions, states, transfer, triton
from service.cli.chat import chat
from service.cli.evaluate import evaluate
from service.cli.export import export
from service.cli.generate import generate
from service.cli.info import info
from service.cli.inspect import inspect
from service.cli.root import new_root
from service.cli.serve import serve
from service.cli.tier import tier
from service.cli.top import top
from service.cli.train import train
from service.cli.tune import tune

FORWARD = {"ignore_unknown_options": True, "allow_extra_args": True}

app = new_root()
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
