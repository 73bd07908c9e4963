"""`nsm keys`: API keys for a server that is not for this machine alone."""

from __future__ import annotations

import datetime
from typing import TYPE_CHECKING, Annotated

import typer

from service.cli.output import note
from service.wishes import quoted

if TYPE_CHECKING:
    from service.api_keys import ApiKey

app = typer.Typer(help="Make API keys.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """A group even with one command, so that others may join it."""


@app.command()
def new(
    tenant: Annotated[str, typer.Option(help="Whose key it is.", show_default=False)],
    metrics: Annotated[bool, typer.Option("--metrics", help="It may also read /metrics.")] = False,
) -> None:
    """Make a key. It is shown once, on standard error; what goes into the file of keys goes to standard output."""
    from pydantic import ValidationError

    from service.api_keys import ApiKey, digest_of, new_key
    from service.settings import load_settings

    load_settings()  # refuses misspelt variables
    key, key_id = new_key()
    try:
        entry = ApiKey(id=key_id, tenant=tenant, sha256=digest_of(key), metrics=metrics)
    except ValidationError as error:
        wish = "must be 1 to 64 of a-z, 0-9, _ and -, and begin with a letter or digit"
        raise typer.BadParameter(f"{wish}, got {quoted(tenant)}", param_hint="'--tenant'") from error
    note(f"key for {tenant}, shown this once: {key}")
    print("\n".join(lines_of(entry, datetime.datetime.now(datetime.UTC).date())))


def lines_of(entry: ApiKey, made_on: datetime.date) -> list[str]:
    """The entry as it stands in the file."""
    lines = ["", f"[[keys]]  # made on {made_on}", f'id = "{entry.id}"', f'tenant = "{entry.tenant}"']
    return [*lines, f'sha256 = "{entry.sha256}"', *(["metrics = true"] if entry.metrics else [])]
