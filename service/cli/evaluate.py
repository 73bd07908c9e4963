"""`nsm eval`: the options of `python -m nsm_lab.evaluation`, with NSM_MODEL and NSM_DEVICE as defaults."""

from __future__ import annotations

import typer

from service.cli.lab import lab_command


@lab_command()
def evaluate(ctx: typer.Context) -> None:
    """Measure a model on a corpus: bits per byte and word perplexity."""
    from nsm_lab.evaluation.__main__ import log_line, parse
    from service.cli.forwarding import parsed
    from service.settings import load_settings

    settings = load_settings()
    defaults = [] if settings.model is None else ["--model", str(settings.model)]
    if "device" in settings.model_fields_set:
        defaults += ["--device", settings.device]
    config = parsed(parse, [*defaults, *ctx.args])
    from nsm_lab.evaluation.run import run_evaluation  # matplotlib, which help does without

    print(run_evaluation(config, log=log_line).to_markdown(), end="")
