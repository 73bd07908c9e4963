"""`nsm sessions`: lists, shows and deletes sessions of a store, also beside a running server. Loads no model."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated, Any

import typer

from service.cli import options
from service.cli.output import console, local_time, print_fields, print_json, print_list, write_text
from service.cli.stores import opened_store, store_settings
from service.stores.sessions.base import DEFAULT_TENANT
from service.stores.sessions.key import SessionKey

if TYPE_CHECKING:
    from pathlib import Path

    from nsm_core.tokenizer import Tokenizer
    from service.settings import Settings
    from service.stores.sessions.base import SessionHead

PAGE = 100

SessionId = Annotated[str, typer.Argument(help="Id of a session, as `nsm sessions list` shows it.", show_default=False)]

app = typer.Typer(help="Stored sessions: show, delete, back up, move, verify.", no_args_is_help=True)


@app.command("list")
def list_sessions(
    limit: Annotated[int, typer.Option(min=1, help="Most sessions to show.")] = 20,
    tenant: options.Tenant = DEFAULT_TENANT,
    data_dir: options.DataDir = None,
    store: options.Store = None,
    as_json: options.AsJson = False,
) -> None:
    """Sessions, newest first."""
    heads = asyncio.run(_newest(store_settings(data_dir, store), tenant, limit))
    print_list(heads, as_json=as_json, fields=session_fields, table=_print_table, none="no sessions")


@app.command()
def show(
    session_id: SessionId,
    tenant: options.Tenant = DEFAULT_TENANT,
    data_dir: options.DataDir = None,
    store: options.Store = None,
    as_json: options.AsJson = False,
) -> None:
    """One session: version, position and size."""
    head = asyncio.run(_get(store_settings(data_dir, store), SessionKey(tenant, session_id)))
    if as_json:
        print_json(session_fields(head))
    else:
        _print_fields(head)


@app.command()
def delete(
    session_id: SessionId,
    tenant: options.Tenant = DEFAULT_TENANT,
    data_dir: options.DataDir = None,
    store: options.Store = None,
) -> None:
    """Delete a session for good: its state, its log, its head."""
    asyncio.run(_delete(store_settings(data_dir, store), SessionKey(tenant, session_id)))
    print(f"deleted {session_id}")


@app.command()
def log(
    session_id: SessionId,
    tenant: options.Tenant = DEFAULT_TENANT,
    model: options.Model = None,
    device: options.Device = None,
    data_dir: options.DataDir = None,
    store: options.Store = None,
    ids: Annotated[bool, typer.Option("--ids", help="Print token ids instead of text; needs no model.")] = False,
    as_json: options.AsJson = False,
) -> None:
    """Everything a session has read and written, from its token log."""
    settings = store_settings(data_dir, store, model=model, device=device)
    head, log_ids = asyncio.run(_read_log(settings, SessionKey(tenant, session_id)))
    text = None if ids else _tokenizer_of(settings, head).decode(log_ids)
    if as_json:
        print_json({"id": session_id, "ids": list(log_ids), **({} if text is None else {"text": text})})
    else:
        write_text((" ".join(map(str, log_ids)) if text is None else text) + "\n")


def session_fields(head: SessionHead) -> dict[str, Any]:
    """A session as JSON; times are unix seconds."""
    return {
        "id": head.session_id,
        "version": head.version,
        "position": head.position,
        "created_at": head.created_at,
        "updated_at": head.updated_at,
        "model_fingerprint": head.model_fingerprint,
        "num_log_tokens": head.num_log_tokens,
        "snapshot_bytes": head.snapshot_bytes,
        "metadata": dict(head.metadata),
    }


async def _newest(settings: Settings, tenant: str, limit: int) -> list[SessionHead]:
    """Up to `limit` heads of however many pages."""
    from service.transfer.damage import unreadable_list

    heads: list[SessionHead] = []
    cursor: str | None = None
    async with opened_store(settings) as store:
        while len(heads) < limit:
            with unreadable_list():
                page = await store.list(tenant=tenant, limit=min(PAGE, limit - len(heads)), cursor=cursor)
            heads += page.heads
            cursor = page.next_cursor
            if cursor is None:
                break
    return heads


async def _get(settings: Settings, key: SessionKey) -> SessionHead:
    async with opened_store(settings) as store:
        return await store.get(key)


async def _delete(settings: Settings, key: SessionKey) -> None:
    from nsm_core.errors import StoreDamaged

    async with opened_store(settings) as store:
        try:
            await store.delete(key)
        except StoreDamaged as error:
            raise StoreDamaged(f"session {key.session_id!r} was not deleted: {error.with_notes()}") from error


async def _read_log(settings: Settings, key: SessionKey) -> tuple[SessionHead, tuple[int, ...]]:
    async with opened_store(settings) as store:
        head = await store.get(key)
        return head, await store.read_log(key)


def _tokenizer_of(settings: Settings, head: SessionHead) -> Tokenizer:
    """The tokenizer of the session's log; raises StateMismatch when the model at hand has another."""
    from nsm_core.errors import StateMismatch
    from nsm_core.model.bundled import find_checkpoint
    from service.state.other_model import shown_model

    fingerprint, tokenizer = _identify(find_checkpoint(settings.model))
    if head.model_fingerprint != fingerprint and head.tokenizer_fingerprint != tokenizer.fingerprint:
        raise StateMismatch(
            f"session {head.session_id} was made by model {shown_model(head.model_fingerprint)}, "
            f"{find_checkpoint(settings.model)} is {shown_model(fingerprint)}: name the right one with --model, "
            "or print token ids with --ids"
        )
    return tokenizer


def _identify(path: Path) -> tuple[str, Tokenizer]:
    """Without torch where the files are certainly of the architecture that needs none for it."""
    from nsm_core.model.identity import fingerprint, is_nsm
    from nsm_core.tokenizer import BpeTokenizer

    if is_nsm(path):
        return fingerprint(path), BpeTokenizer.load(path)
    from nsm_core.architectures import identify

    return identify(path)


def _print_table(heads: list[SessionHead]) -> None:
    from rich.filesize import decimal
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in ("session", "version", "position", "state", "last turn", "model"):
        table.add_column(name, justify="right" if name in ("version", "position", "state") else "left", no_wrap=True)
    for head in heads:
        size = decimal(head.snapshot_bytes)
        counts = (str(head.version), str(head.position), size)
        table.add_row(head.session_id, *counts, local_time(head.updated_at), head.model_fingerprint[:12])
    console().print(table)


def _print_fields(head: SessionHead) -> None:
    from rich.filesize import decimal

    metadata = {f"metadata {key}": value for key, value in head.metadata.items()}
    print_fields(
        {
            "session": head.session_id,
            "version": f"{head.version} (committed turns)",
            "position": f"{head.position} (tokens read)",
            "token log": f"{head.num_log_tokens} tokens",
            "state": decimal(head.snapshot_bytes),
            "created": local_time(head.created_at),
            "last turn": local_time(head.updated_at),
            "model": head.model_fingerprint,
            **metadata,
        }
    )
