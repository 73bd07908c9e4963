"""`nsm model`: what model files hold, before anything loads, and the same model in this project's own form."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nsm_core.errors import CheckpointError
from service.cli import options
from service.cli.output import note, print_fields, print_json

if TYPE_CHECKING:
    from nsm_core.rwkv7.opening import OpenModel

app = typer.Typer(help="Model files.", no_args_is_help=True)

ModelPath = Annotated[
    Path, typer.Argument(help="Model file or directory, or the name of a bundled model.", show_default=False)
]


class ModelFormat(enum.StrEnum):
    """How the large matrices are written."""

    INT8 = "int8"
    INT4 = "int4"
    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"


@app.command()
def inspect(model: ModelPath, as_json: options.AsJson = False) -> None:
    """Show a model's architecture, sizes, state, tokenizer and template; only headers of its files are read."""
    path, files = _found(model)
    facts = files.describe(path)
    if as_json:
        print_json(facts)
    else:
        print_fields({name.replace("_", " "): _shown(value) for name, value in facts.items()})


@app.command()
def convert(
    model: ModelPath,
    output: Annotated[Path, typer.Option("--out", help="Directory to write, new or empty.", show_default=False)],
    weight_format: Annotated[
        ModelFormat, typer.Option(help="Of the large matrices; int8 has a scale for each row, int4 grids too.")
    ] = ModelFormat.INT8,
    chat_template: Annotated[
        str | None,
        typer.Option(help="Name of a template, or a file of Jinja.", show_default="the model's own"),
    ] = None,
) -> None:
    """Write a model, RWKV-7 of any layout too, as a model directory with other numbers."""
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise typer.BadParameter(f"{output} is not a new or empty directory", param_hint="'--out'")
    path, files = _found(model)
    template, written = files.convert(path, output, weight_format, chat_template)
    total = sum(file.stat().st_size for file in output.iterdir())
    note(f"{output}: {total:,} bytes, {written}, chat template {_first_line(template)}")


def _found(model: Path) -> tuple[Path, _Files]:
    """Where a model is, and the commands for its architecture. Raises CheckpointError."""
    from nsm_core.architectures import architecture_of
    from nsm_core.model.bundled import find_checkpoint

    path = find_checkpoint(model)
    return path, FILES[architecture_of(path).name]


def _convert_rwkv7(path: Path, output: Path, weight_format: ModelFormat, chat_template: str | None) -> tuple[str, str]:
    from nsm_core.rwkv7.opening import OpenModel
    from nsm_core.rwkv7.saving import save_model

    opened = OpenModel(path)
    template = opened.template.text if chat_template is None else _template_text(chat_template)
    save_model(opened, output, weight_format.value, chat_template=template)
    return template, OpenModel(output).tensors.weight_format


def _convert_nsm(path: Path, output: Path, weight_format: ModelFormat, chat_template: str | None) -> tuple[str, str]:
    from nsm_core.config import ModelConfig
    from nsm_core.model.storage import CONFIG_FILE, WeightFormat, convert_model, require_directory

    require_directory(path)
    if weight_format is ModelFormat.FP16:
        raise typer.BadParameter(f"{path} can be int8, int4, bf16 or fp32", param_hint="'--weight-format'")
    template = None if chat_template is None else _template_text(chat_template)
    convert_model(path, output, WeightFormat(weight_format.value), chat_template=template)
    return ModelConfig.load(output / CONFIG_FILE).chat_template, weight_format.value


def _describe_rwkv7(path: Path) -> dict[str, Any]:
    from nsm_core.rwkv7.opening import OpenModel

    return rwkv7_facts(OpenModel(path))


def rwkv7_facts(model: OpenModel) -> dict[str, Any]:
    """The headers of an RWKV-7 model, or the names of its missing parts."""
    from nsm_core.execution.rwkv7.choose import planned_executor
    from nsm_core.rwkv7.model import state_spec
    from nsm_core.rwkv7.tensors import num_parameters

    config = model.tensors.config
    facts: dict[str, Any] = {
        "architecture": "rwkv7",
        "files": model.files.form,
        "parameters": num_parameters(config),
        "layers": config.num_layers,
        "width": config.width,
        "heads": f"{config.num_heads} of {config.head_size}",
        "hidden": config.hidden,
        "ranks": {
            "decay": config.decay_rank,
            "rate": config.rate_rank,
            "value": config.value_rank,
            "gate": config.gate_rank,
        },
        "vocabulary": config.vocab_size,
        "weights": model.tensors.weight_format,
        "stored_as": model.tensors.kinds,
        "state_bytes": state_spec(config).num_bytes,
        "executor": planned_executor(config, model.tensors.weight_format),
        "tokenizer": _tokenizer_fact(model),
        "chat_template": _first_line(model.template.text),
    }
    if model.template.note is not None:
        facts["chat_template_note"] = model.template.note
    return facts


def _tokenizer_fact(model: OpenModel) -> str:
    try:
        tokenizer = model.tokenizer()
    except CheckpointError as error:
        return f"missing: {error}"
    return f"{type(tokenizer).__name__}, {len(tokenizer.ids_with(frozenset(range(256)))):,} tokens of text"


def _describe_nsm(path: Path) -> dict[str, Any]:
    from nsm_core.execution.choose import choose_executor
    from nsm_core.model.loader import load_checkpoint

    loaded = load_checkpoint(path)
    return {
        "architecture": "nsm",
        "files": "nsm",
        "parameters": loaded.num_parameters,
        "layers": loaded.config.num_layers,
        "width": loaded.config.d_model,
        "vocabulary": loaded.tokenizer.vocab_size,
        "weights": loaded.weight_format,
        "state_bytes": loaded.model.state_spec.num_bytes,
        "executor": choose_executor(loaded).name,
        "tokenizer": type(loaded.tokenizer).__name__,
        "chat_template": loaded.config.chat_template,
    }


@dataclasses.dataclass(frozen=True, slots=True)
class _Files:
    """What `nsm model` does with an architecture's files. `convert`: from a path, to a directory, in a format, with a
    chat template or the model's own; returns the written template and format.
    """

    describe: Callable[[Path], dict[str, Any]]
    convert: Callable[[Path, Path, ModelFormat, str | None], tuple[str, str]]


# By the architecture's name in nsm_core/architectures.py
FILES = {"rwkv7": _Files(_describe_rwkv7, _convert_rwkv7), "nsm": _Files(_describe_nsm, _convert_nsm)}


def _template_text(given: str) -> str:
    """Raises a usage error for anything but a template's name or a file with a usable template."""
    from nsm_core.chat_template import read_template

    try:
        return read_template(given)
    except CheckpointError as error:
        raise typer.BadParameter(str(error), param_hint="'--chat-template'") from error


def _first_line(template: str) -> str:
    """A name as it is; of Jinja, that it is."""
    return template if "{" not in template else f"Jinja, {len(template):,} characters"


def _shown(value: Any) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, dict):
        return ", ".join(f"{name} {number:,}" for name, number in value.items())
    return str(value)
