"""`nsm states`: named states of a store, also beside a running server. Only `create` loads the model."""

from __future__ import annotations

import asyncio
import contextlib
import math
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from service.cli import options
from service.cli.output import console, local_time, print_fields, print_json, print_list, printable
from service.cli.stores import opened_store, store_settings, target_settings
from service.stores.sessions.base import DEFAULT_TENANT
from service.stores.sessions.key import SessionKey

if TYPE_CHECKING:
    from nsm_core.errors import NotFound
    from service.named_states.reference import Reference
    from service.named_states.signature import StateSeal
    from service.settings import Settings
    from service.stores.states.base import NamedState, NewState, StateStore
    from service.transfer.session_file import SessionFile

Name = Annotated[str, typer.Argument(help="1 to 64 of A-Z a-z 0-9 _ and -.", show_default=False)]
State = Annotated[str, typer.Argument(help="name, or name@version.", show_default=False)]
Published = Annotated[bool, typer.Option("--published", help="A state of all tenants.")]

app = typer.Typer(help="Named start states: make, show, delete, move.", no_args_is_help=True)


@app.command("list")
def list_states(
    tenant: options.Tenant = DEFAULT_TENANT,
    data_dir: options.DataDir = None,
    store: options.Store = None,
    as_json: options.AsJson = False,
) -> None:
    """A tenant's states and the published ones, by name, the newest version first."""
    found = asyncio.run(_list(store_settings(data_dir, store), tenant))
    print_list(found, as_json=as_json, fields=_fields, table=_print_table, none="no states")


@app.command()
def create(
    name: Name,
    text: Annotated[str | None, typer.Option(help="Read this text.", show_default=False)] = None,
    file: Annotated[Path | None, typer.Option(help="Read this text file.", show_default=False)] = None,
    session: Annotated[str | None, typer.Option(help="Copy this session's state.", show_default=False)] = None,
    position: Annotated[
        int | None, typer.Option(help="Of the session, after so many tokens.", show_default="its newest commit")
    ] = None,
    published: Published = False,
    tenant: options.Tenant = DEFAULT_TENANT,
    model: options.Model = None,
    device: options.Device = None,
    data_dir: options.DataDir = None,
    store: options.Store = None,
) -> None:
    """The next version of a name, from a text, a text file or a session."""
    if sum(source is not None for source in (text, file, session)) != 1:
        raise typer.BadParameter("give exactly one of --text, --file and --session")
    if position is not None and session is None:
        raise typer.BadParameter("--position is for --session")
    settings = target_settings(data_dir, store, model=model, device=device)
    words = text if file is None else file.read_text("utf-8")
    if words == "":
        raise typer.BadParameter("a state must read at least 1 character, the text is empty")
    made = asyncio.run(_create(settings, _checked(name), words, session, position, tenant, published))
    print(f"made {made.reference}: {made.num_tokens} tokens")


@app.command()
def show(
    state: State,
    tenant: options.Tenant = DEFAULT_TENANT,
    data_dir: options.DataDir = None,
    store: options.Store = None,
    as_json: options.AsJson = False,
) -> None:
    """One version: its model, position and size."""
    found = asyncio.run(_find(store_settings(data_dir, store), tenant, _reference(state)))
    if as_json:
        print_json(_fields(found))
    else:
        _print_fields(found)


@app.command()
def delete(
    state: State,
    published: Published = False,
    tenant: options.Tenant = DEFAULT_TENANT,
    data_dir: options.DataDir = None,
    store: options.Store = None,
) -> None:
    """Delete a version, or all versions of a name."""
    num = asyncio.run(_delete(store_settings(data_dir, store), _owner(tenant, published), _reference(state)))
    print(f"deleted {printable(state)}" + (f" ({num} versions)" if num > 1 else ""))


@app.command()
def export(
    state: State,
    file: Annotated[Path, typer.Argument(help="Where to.", show_default=False)],
    tenant: options.Tenant = DEFAULT_TENANT,
    data_dir: options.DataDir = None,
    store: options.Store = None,
) -> None:
    """Write a version into a file, with its token log."""
    settings = store_settings(data_dir, store)
    raw = _seal(settings).seal(asyncio.run(_export(settings, tenant, _reference(state))))
    file.write_bytes(raw)
    print(f"wrote {file}: {len(raw)} bytes")


@app.command("import")
def import_state(
    name: Name,
    file: Annotated[Path, typer.Argument(help="An exported state or session.", show_default=False)],
    published: Published = False,
    tenant: options.Tenant = DEFAULT_TENANT,
    data_dir: options.DataDir = None,
    store: options.Store = None,
) -> None:
    """The next version of a name, from a file."""
    from service.transfer.session_file import read_file

    settings, owner = target_settings(data_dir, store), _owner(tenant, published)
    read = read_file(_seal(settings).open(file.read_bytes(), is_required=False), kind="state")
    made = asyncio.run(_add(settings, _checked(name), owner, read, source="file", text=None))
    print(f"made {made.reference}: {made.num_tokens} tokens")


def _owner(tenant: str, is_published: bool) -> str:
    from service.stores.states.base import PUBLISHED

    return PUBLISHED if is_published else tenant


def _reference(state: str) -> Reference:
    from service.named_states.reference import parse_reference

    return parse_reference(state)


def _seal(settings: Settings) -> StateSeal:
    from service.named_states.signature import StateSeal

    return StateSeal.from_file(settings.state_key_file)


def _checked(name: str) -> str:
    from service.schemas.states import check_state_name

    return check_state_name(name)


def _fields(state: NamedState) -> dict[str, Any]:
    from service.stores.states.base import PUBLISHED

    return {
        "id": state.reference,
        "published": state.tenant == PUBLISHED,
        "created_at": state.created_at,
        "model_fingerprint": state.model_fingerprint,
        "position": state.position,
        "num_tokens": state.num_tokens,
        "num_bytes": state.num_bytes,
        "source": state.source,
        "metadata": dict(state.metadata),
    }


@contextlib.asynccontextmanager
async def _opened(settings: Settings) -> AsyncIterator[StateStore]:
    from service.stores.states.factory import states_beside

    async with opened_store(settings) as sessions:
        yield states_beside(sessions)


async def _list(settings: Settings, tenant: str) -> list[NamedState]:
    from service.stores.states.base import PUBLISHED

    async with _opened(settings) as states:
        return [state for owner in (tenant, PUBLISHED) for state in await states.list(tenant=owner)]


async def _find(settings: Settings, tenant: str, reference: Reference) -> NamedState:
    async with _opened(settings) as states:
        return await _found(states, tenant, reference)


async def _found(states: StateStore, tenant: str, reference: Reference) -> NamedState:
    from service.stores.states.base import PUBLISHED

    for owner in (tenant, PUBLISHED):
        state = await states.get(tenant=owner, name=reference.name, version=reference.version)
        if state is not None:
            return state
    raise _missing(reference)


def _missing(reference: Reference) -> NotFound:
    from service.named_states.reference import state_not_found

    return state_not_found(reference)


async def _delete(settings: Settings, owner: str, reference: Reference) -> int:
    async with _opened(settings) as states:
        num = await states.delete(tenant=owner, name=reference.name, version=reference.version)
        if not num:
            raise _missing(reference)
        return num


async def _export(settings: Settings, tenant: str, reference: Reference) -> bytes:
    from service.named_states.library import read_stored

    async with _opened(settings) as states:
        head = await _found(states, tenant, reference)
        stored = await states.load(tenant=head.tenant, name=head.name, version=head.version)
        if stored is None:
            raise _missing(reference)
        read_stored(stored)
        return stored.file


async def _add(
    settings: Settings, name: str, owner: str, file: SessionFile, *, source: str, text: str | None
) -> NamedState:
    async with _opened(settings) as states:
        return await states.add(tenant=owner, name=name, state=_new(owner, name, file, source=source, text=text))


def _new(owner: str, name: str, file: SessionFile, *, source: str, text: str | None) -> NewState:
    from service.named_states.library import new_state

    return new_state(owner, name, file, source=source, text=text, metadata={})


async def _create(
    settings: Settings,
    name: str,
    text: str | None,
    session: str | None,
    position: int | None,
    tenant: str,
    is_published: bool,
) -> NamedState:
    from nsm_core.state.quantize import StateFormat
    from service.named_states.create import session_file
    from service.named_states.making import Reader
    from service.prompts import PromptEncoder
    from service.server import make_backend
    from service.state.log_location import LogLocation
    from service.stores.states.factory import states_beside

    owner, state_format = _owner(tenant, is_published), StateFormat(settings.state_dtype)
    async with opened_store(settings) as sessions:
        backend = make_backend(settings)
        await backend.start()
        try:
            if session is None:
                ids = (await PromptEncoder(backend, max_tokens=settings.max_prompt_tokens).fresh(text or "")).ids
                reader = Reader(
                    backend=backend, request_id=uuid.uuid4().hex, deadline=math.inf, state_format=state_format
                )
                file = await reader.file_of(ids, tenant=owner, name=name)
            else:
                location = None if position is None else LogLocation(version=None, position=position)
                file = await session_file(
                    backend,
                    sessions,
                    None,
                    SessionKey(tenant, session),
                    location,
                    deadline=math.inf,
                    state_format=state_format,
                )
        finally:
            await backend.stop()
        source = "text" if session is None else "session"
        new = _new(owner, name, file, source=source, text=text)
        return await states_beside(sessions).add(tenant=owner, name=name, state=new)


def _print_fields(state: NamedState) -> None:
    from rich.filesize import decimal

    from service.stores.states.base import PUBLISHED

    metadata = {f"metadata {key}": value for key, value in state.metadata.items()}
    print_fields(
        {
            "state": state.reference,
            "published": "yes" if state.tenant == PUBLISHED else "no",
            "position": f"{state.position} (tokens read)",
            "token log": f"{state.num_tokens} tokens",
            "size": decimal(state.num_bytes),
            "source": state.source,
            "created": local_time(state.created_at),
            "model": state.model_fingerprint,
            **metadata,
        }
    )


def _print_table(states: list[NamedState]) -> None:
    from rich.filesize import decimal
    from rich.table import Table

    from service.stores.states.base import PUBLISHED

    table = Table(box=None, pad_edge=False)
    for name in ("state", "position", "size", "source", "owner", "model"):
        table.add_column(name, justify="right" if name in ("position", "size") else "left", no_wrap=True)
    for state in states:
        owner = "published" if state.tenant == PUBLISHED else state.tenant
        sizes = (str(state.position), decimal(state.num_bytes))
        table.add_row(state.reference, *sizes, state.source, owner, state.model_fingerprint[:12])
    console().print(table)
