"""`nsm eval`: the options of `python -m nsm_lab.evaluation`, with NSM_MODEL as the default model."""

from __future__ import annotations

import typer

from service.cli.lab import lab_command


@lab_command()
def evaluate(ctx: typer.Context) -> None:
    """Measure a model on a corpus: bits per byte and word perplexity."""
    from nsm_lab.evaluation.__main__ import log_line, parse
    from nsm_lab.evaluation.run import run_evaluation
    from service.cli.forwarding import parsed
    from service.settings import load_settings

    model = load_settings().model
    defaults = [] if model is None else ["--model", str(model)]
    print(run_evaluation(parsed(parse, [*defaults, *ctx.args]), log=log_line).to_markdown(), end="")
