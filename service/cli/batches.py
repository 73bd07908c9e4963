"""`nsm batches`: batches of a store, also beside a running server, which runs them. No command loads the model."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from service.cli import options
from service.cli.output import console, local_time, note, print_fields, print_json, print_list, printable
from service.cli.stores import opened_store, store_settings, target_settings
from service.stores.sessions.base import DEFAULT_TENANT

if TYPE_CHECKING:
    from service.batches.batch import Batch
    from service.batches.library import BatchLibrary
    from service.files.stored_files import Files
    from service.settings import Settings

BatchId = Annotated[str, typer.Argument(metavar="BATCH", help="Id of a batch.", show_default=False)]
WINDOW = "24h"
STDOUT = "-"

app = typer.Typer(help="Batches of requests: create, follow, cancel, fetch the answers.", no_args_is_help=True)


@app.command()
def create(
    file: Annotated[Path, typer.Argument(help="JSON lines: a request in each.", show_default=False)],
    endpoint: Annotated[
        str | None, typer.Option(help="That all requests are for.", show_default="the url of the first line")
    ] = None,
    tenant: options.Tenant = DEFAULT_TENANT,
    data_dir: options.DataDir = None,
    store: options.Store = None,
) -> None:
    """Store a file of requests for the next server that runs on the store. A wrong line is named; nothing is stored."""
    raw = file.read_bytes()
    found, num_lines = _checked(raw, endpoint)
    made = asyncio.run(_create(target_settings(data_dir, store), tenant, raw, file.name, found))
    print(f"made {made.id}: {num_lines} requests for {found}")


@app.command("list")
def list_batches(
    tenant: options.Tenant = DEFAULT_TENANT,
    data_dir: options.DataDir = None,
    store: options.Store = None,
    as_json: options.AsJson = False,
) -> None:
    """A tenant's batches, the newest first."""
    found = asyncio.run(_list(store_settings(data_dir, store), tenant))
    print_list(found, as_json=as_json, fields=lambda batch: dict(batch.fields), table=_print_table, none="no batches")


@app.command()
def show(
    batch_id: BatchId,
    tenant: options.Tenant = DEFAULT_TENANT,
    data_dir: options.DataDir = None,
    store: options.Store = None,
    as_json: options.AsJson = False,
) -> None:
    """How far one is, and why it failed."""
    found = asyncio.run(_find(store_settings(data_dir, store), tenant, batch_id))
    if as_json:
        print_json(dict(found.fields))
    else:
        _print_fields(found)


@app.command()
def cancel(
    batch_id: BatchId,
    tenant: options.Tenant = DEFAULT_TENANT,
    data_dir: options.DataDir = None,
    store: options.Store = None,
) -> None:
    """End one. Its server does so within seconds; what was answered by then can be downloaded."""
    found = asyncio.run(_cancel(store_settings(data_dir, store), tenant, batch_id))
    print(f"{found.id} is {found.status}")


@app.command()
def download(
    batch_id: BatchId,
    file: Annotated[Path, typer.Argument(help="Where to; - writes to standard output.", show_default=False)],
    errors: Annotated[
        bool, typer.Option("--errors", help="The requests without an answer, in place of the answers.")
    ] = False,
    tenant: options.Tenant = DEFAULT_TENANT,
    data_dir: options.DataDir = None,
    store: options.Store = None,
) -> None:
    """Write the answers of one that has ended into a file, a line each."""
    raw = asyncio.run(_output(store_settings(data_dir, store), tenant, batch_id, has_failed=errors))
    if str(file) == STDOUT:
        sys.stdout.buffer.write(raw)
        return
    file.write_bytes(raw)
    print(f"wrote {file}: {len(raw.splitlines())} lines")


def _checked(raw: bytes, endpoint: str | None) -> tuple[str, int]:
    """The endpoint, and the number of requests. Raises InvalidRequest for a file that no server would run."""
    from nsm_core.errors import InvalidRequest
    from service.batches.input_lines import InputErrors, first_endpoint, read_lines
    from service.schemas.batches import check_endpoint

    found = first_endpoint(raw) if endpoint is None else check_endpoint(endpoint)
    lines = read_lines(raw, endpoint=found)
    if not isinstance(lines, InputErrors):
        return found, len(lines)
    for error in lines.errors[1:]:
        note(_words(error))
    raise InvalidRequest(_words(lines.errors[0]))


def _words(error: Any) -> str:
    return error["message"] if error["line"] is None else f"line {error['line']}: {error['message']}"


@contextlib.asynccontextmanager
async def _opened(settings: Settings) -> AsyncIterator[tuple[BatchLibrary, Files]]:
    from service.batches.library import BatchLibrary
    from service.files.stored_files import Files
    from service.stores.records.factory import records_beside

    async with opened_store(settings) as sessions:
        records = records_beside(sessions)
        yield BatchLibrary(records), Files(records)


async def _create(settings: Settings, tenant: str, raw: bytes, filename: str, endpoint: str) -> Batch:
    from service.batches.batch import new_batch

    async with _opened(settings) as (batches, files):
        file = await files.create(tenant, raw, filename=filename, purpose="batch")
        batch = new_batch(
            tenant,
            endpoint=endpoint,
            input_file_id=file.id,
            completion_window=WINDOW,
            metadata={},
            output_ttl_s=None,
        )
        return await batches.add(batch)


async def _list(settings: Settings, tenant: str) -> list[Batch]:
    async with _opened(settings) as (batches, _):
        return list(reversed(await batches.list_all(tenant)))


async def _find(settings: Settings, tenant: str, batch_id: str) -> Batch:
    async with _opened(settings) as (batches, _):
        return await batches.get(tenant, batch_id)


async def _cancel(settings: Settings, tenant: str, batch_id: str) -> Batch:
    async with _opened(settings) as (batches, _):
        return await batches.cancel(tenant, batch_id)


async def _output(settings: Settings, tenant: str, batch_id: str, *, has_failed: bool) -> bytes:
    """Nothing where no request has ended so. Raises InvalidRequest for a batch that has not ended."""
    from nsm_core.errors import InvalidRequest

    async with _opened(settings) as (batches, files):
        batch = await batches.get(tenant, batch_id)
        if not batch.has_ended:
            raise InvalidRequest(f"batch {batch.id!r} is {batch.status}: it has no output yet")
        file_id = batch.fields["error_file_id" if has_failed else "output_file_id"]
        return b"" if file_id is None else await files.read(tenant, await files.get(tenant, file_id))


def _done(batch: Batch) -> str:
    counts = batch.fields["request_counts"]
    return f"{counts['completed'] + counts['failed']}/{counts['total']}" if counts["total"] else "-"


def _print_fields(batch: Batch) -> None:
    fields, counts = batch.fields, batch.fields["request_counts"]
    files = {"output file": fields["output_file_id"], "error file": fields["error_file_id"]}
    errors = [] if fields["errors"] is None else fields["errors"]["data"]
    print_fields(
        {
            "batch": batch.id,
            "status": batch.status,
            "endpoint": fields["endpoint"],
            "requests": f"{counts['total']}, {counts['completed']} answered, {counts['failed']} failed",
            "created": local_time(fields["created_at"]),
            "input file": fields["input_file_id"],
            **{name: file_id for name, file_id in files.items() if file_id is not None},
            **({"errors": "\n".join(_words(error) for error in errors)} if errors else {}),
            **{f"metadata {key}": value for key, value in (fields["metadata"] or {}).items()},
        }
    )


def _print_table(batches: list[Batch]) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in ("batch", "status", "done", "failed", "endpoint", "created"):
        table.add_column(name, justify="right" if name in ("done", "failed") else "left", no_wrap=True)
    for batch in batches:
        num_failed = str(batch.fields["request_counts"]["failed"])
        created = local_time(batch.fields["created_at"])
        table.add_row(batch.id, batch.status, _done(batch), num_failed, printable(batch.fields["endpoint"]), created)
    console().print(table)
