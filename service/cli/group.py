"""How commands fail: one line on standard error and an exit status, never a traceback."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import typer
from typer.core import TyperGroup

from nsm_core.errors import NsmError
from service.messages import quoted, validation_message


class Commands(TyperGroup):
    """The root of all commands. Exit status: 0, 1 for an error, 2 for wrong usage, 130 after Ctrl-C."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        given = list(sys.argv[1:] if args is None else args)
        try:
            status = super().main(given or ["--help"], "nsm", complete_var, False, windows_expand_args, **extra)
        except typer.TyperException as error:
            if _is_help(error):
                print(error.message)
            else:
                _reword(error)
                print(f"nsm: {_one_line(error.format_message())}", file=sys.stderr)
            sys.exit(error.exit_code)
        except typer.Abort:
            sys.exit(1)
        sys.exit(status if isinstance(status, int) else 0)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        command = super().get_command(ctx, cmd_name)
        if command is not None:
            _prepare_help(command, ctx)
        return command

    def get_params(self, ctx: Any) -> Any:
        params = super().get_params(ctx)
        _clear_types_of_flags(params)
        return params

    def invoke(self, ctx: Any) -> Any:  # typer does not name its context's base class publicly
        is_debug = bool(ctx.params["debug"])
        if not is_debug:
            # without a handler Python prints every warning of the libraries, with traceback
            logging.getLogger("nsm").addHandler(logging.NullHandler())
        try:
            return super().invoke(ctx)
        except (typer.TyperException, typer.Exit, typer.Abort, BrokenPipeError):
            raise  # typer's own; a closed output ends the command silently
        except Exception as error:
            if is_debug:
                raise
            raise typer.TyperException(_describe(error)) from error


def _is_help(error: typer.TyperException) -> bool:
    """Of a group without a command."""
    context = getattr(error, "ctx", None)
    return context is not None and error.message == context.get_help()


def _prepare_help(command: Any, ctx: Any) -> None:
    """Of a command and of those below it: flags without a type, and first sentences that lists do not cut."""
    _clear_types_of_flags(command.get_params(ctx))
    command.short_help = command.short_help or " ".join((command.help or "").split("\n\n")[0].split())
    for inner in getattr(command, "commands", {}).values():
        _prepare_help(inner, ctx)


def _clear_types_of_flags(params: Iterable[Any]) -> None:
    """A flag takes no value; typer writes <bool> behind it."""
    for option in params:
        if getattr(option, "is_bool_flag", False):
            option.metavar = ""


def _reword(error: typer.TyperException) -> None:
    """A value that pydantic refused, in the words of settings and of HTTP's errors."""
    refused = error.__cause__
    if refused is None:
        return
    from pydantic import ValidationError

    found = refused.errors()[0] if isinstance(refused, ValidationError) else None
    if found is not None and error.message == found["msg"]:  # else a command has words of its own
        message, given = validation_message(found).removesuffix("."), quoted(str(found["input"]))
        error.message = message if given in message else f"{message}, got {given}"


def _describe(error: Exception) -> str:
    """The error as one line for a user."""
    if isinstance(error, NsmError):
        return error.with_notes()
    if isinstance(error, UnicodeDecodeError):
        return f"the input is not valid {error.encoding}: {error.reason} at byte {error.start}"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"
    return f"internal error: {type(error).__name__}: {error} (nsm --debug shows where)"


def _one_line(text: str) -> str:
    return " ".join(text.split())
