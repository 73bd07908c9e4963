"""`nsm export`: a model as graphs for other runtimes."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated

import typer

from nsm_core.errors import ConfigError
from service.cli.lab import lab_command
from service.cli.output import note

MAX_PROMPT_LEN = 2048


class ExportFormat(enum.StrEnum):
    """Export for other runtimes."""

    ONNX = "onnx"
    TORCH = "torch"


@lab_command()
def export(
    model: Annotated[Path, typer.Argument(help="Model directory, or the name of a bundled model.", show_default=False)],
    output: Annotated[Path, typer.Option(help="Folder to write, new or empty.", show_default=False)],
    form: Annotated[ExportFormat, typer.Option("--format", help="onnx, or torch.export's.")] = ExportFormat.ONNX,
    int8: Annotated[bool, typer.Option("--int8", help="Store large matrices as int8 (onnx).")] = False,
    prompt_len: Annotated[
        int | None,
        typer.Option(min=2, max=MAX_PROMPT_LEN, show_default=False, help="Also a function that reads so many tokens."),
    ] = None,
) -> None:
    """Write a model's step, ids and state in, logits and state out, for ONNX Runtime or torch.export."""
    if int8 and form is not ExportFormat.ONNX:
        raise typer.BadParameter("needs --format onnx", param_hint="'--int8'")
    from nsm_lab.baselines.register import register_baselines
    from nsm_lab.export.write import check_target, export_model

    try:
        check_target(output)
    except ConfigError as error:
        raise typer.BadParameter(str(error), param_hint="'--output'") from error
    from nsm_core.model.loader import load_checkpoint

    register_baselines()
    loaded = load_checkpoint(model)
    try:
        files = export_model(loaded, output, form.value, is_int8=int8, prompt_len=prompt_len)
    except ConfigError as error:
        raise typer.BadParameter(str(error), param_hint="'--format'") from error
    for file in files:
        note(f"{file}: {file.stat().st_size:,} bytes")
