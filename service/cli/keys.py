"""`nsm keys`: API keys for a server that is not for this machine alone."""

from __future__ import annotations

import datetime
import os
import stat
import sys
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated

import typer

from service.cli.output import note
from service.messages import quoted

if TYPE_CHECKING:
    from service.tenants.api_keys import ApiKey

app = typer.Typer(help="Make API keys.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """A group even with one command, so that others may join it."""


@app.command()
def new(
    tenant: Annotated[str, typer.Option(help="Whose key it is.", show_default=False)],
    metrics: Annotated[bool, typer.Option("--metrics", help="It may also read /metrics.")] = False,
    file: Annotated[
        Path | None, typer.Option(help="Add it to this file of keys; made when there is none.", show_default=False)
    ] = None,
) -> None:
    """Make a key. It is shown once, on standard error. Its entry goes to the file of keys (--file) or to standard
    output."""
    from pydantic import ValidationError

    from service.settings import load_settings
    from service.tenants.api_keys import ApiKey, digest_of, new_key
    from service.tenants.key_file import add_key

    load_settings()  # refuses misspelt variables
    key, key_id = new_key()
    try:
        entry = ApiKey(id=key_id, tenant=tenant, sha256=digest_of(key), metrics=metrics)
    except ValidationError as error:
        rule = "must be 1 to 64 of a-z, 0-9, _ and -, and begin with a letter or digit"
        raise typer.BadParameter(f"{rule}, got {quoted(tenant)}", param_hint="'--tenant'") from error
    made_on = datetime.datetime.now(datetime.UTC).date()
    if file is None:
        _print(entry, made_on)
    else:
        add_key(file, entry, made_on)
    note(f"key for {tenant}, shown this once: {key}")


def _print(entry: ApiKey, made_on: datetime.date) -> None:
    """As a new file; where output is added to a file that has something, without the tenant, which may stand in it."""
    from service.tenants.key_file import key_lines, tenant_line

    if is_begun(sys.stdout):
        note(f"the file must have {tenant_line(entry.tenant)} once; --file FILE sees to that")
        print(f"\n{key_lines(entry, made_on)}", end="")
    else:
        print(f"{tenant_line(entry.tenant)}\n\n{key_lines(entry, made_on)}", end="")


def is_begun(output: IO[str]) -> bool:
    """Whether it is a file in which something stands already (`>>`)."""
    try:
        found = os.fstat(output.fileno())
    except (OSError, ValueError):  # no file of the system's
        return False
    return stat.S_ISREG(found.st_mode) and found.st_size > 0
