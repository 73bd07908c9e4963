"""`nsm serve`: every setting as an option."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer

from nsm_core.heap import pause_collection
from nsm_core.model.bundled import find_checkpoint
from service.settings import Settings, load_settings, shown_default
from service.telemetry.logs import configure_logging

logger = logging.getLogger("nsm.server")

NUMBERS: Mapping[type, str] = {int: "<int>", float: "<float>"}  # the settings read them: their refusals say more


def serve(ctx: typer.Context, **options: Any) -> None:
    """Serve the model over HTTP until Ctrl-C.

    Every option is also a variable, --max-slots is NSM_MAX_SLOTS; the option wins. Times are in seconds.
    """
    pause_collection()  # most of a start is imports
    settings = load_settings(**with_further_models(options))
    configure_logging(settings.log_level, settings.log_format)
    announce(settings)
    from service.server import run  # imports the engine, so it comes after bad settings were refused

    run(settings)


def announce(settings: Settings) -> None:
    """A first line at once: imports and weights take seconds."""
    path = find_checkpoint(settings.model)
    if settings.triton_url is None and path.exists():
        logger.info("starting with %s on device %s", settings.served_model_name or path.resolve().name, settings.device)


def with_further_models(options: dict[str, Any]) -> dict[str, Any]:
    """Of a --model that was given several times the first is the model, and the others are further ones."""
    first, *others = options.pop("model") or [None]
    if others:
        further = [options["models"], *map(str, others)]
        options["models"] = ",".join(item for item in further if item)
    return {**options, "model": first}


def _signature() -> inspect.Signature:
    """The parameters that typer reads: one option for each setting."""
    context = inspect.Parameter("ctx", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)
    return inspect.Signature([context, *map(_option, Settings.model_fields)])


def _option(name: str) -> inspect.Parameter:
    """The default is shown, not set: an option that is absent leaves its variable in force."""
    field = Settings.model_fields[name]
    kind, choices = option_type(field.annotation)
    metavar = f"[{'|'.join(choices)}]" if choices else NUMBERS.get(kind)
    kind = str if kind in NUMBERS else kind
    is_repeated = name == "model"
    help_text = f"{field.description}  [default: {shown_default(name)}]"
    info = typer.Option(help=help_text, show_default=False, metavar="<path>" if is_repeated else metavar)
    annotation = Annotated[list[Path] | None if is_repeated else kind | None, info]  # type: ignore[valid-type]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def option_type(annotation: Any) -> tuple[type, tuple[str, ...]]:
    """The plain type of a setting, and its choices. The settings themselves check the value."""
    if get_origin(annotation) is Literal:
        return str, get_args(annotation)
    if get_origin(annotation) in (Union, UnionType):
        return option_type(next(part for part in get_args(annotation) if part is not NoneType))
    return next(kind for kind in (bool, int, float, Path, str) if annotation is kind), ()


serve.__signature__ = _signature()  # type: ignore[attr-defined]
