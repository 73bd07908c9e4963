"""`nsm sessions backup`, `restore` and `copy`: all that a store holds at once, beside a running server."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO

import typer

from service.cli import options
from service.cli.output import note
from service.cli.progress import progress
from service.cli.stores import opened_store, source_settings, target_settings

if TYPE_CHECKING:
    from service.settings import Settings
    from service.transfer.backup import Outcome, TransferResult, What

Tenant = Annotated[
    str | None, typer.Option(help="Only what this tenant has; '*': what is published.", show_default="all tenants")
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace sessions that are there under the same id.")]

SAID: dict[Outcome, str] = {
    "written": "written",
    "replaced": "replaced",
    "same": "there already",
    "exists": "skipped: another one has the id (--overwrite replaces it)",
    "gone": "deleted meanwhile",
    "failed": "not written",
}
SAID_OF_STATE = "skipped: another one has the name and version (delete it first to restore this one)"


def backup(
    file: Annotated[Path, typer.Argument(help="Where to; an older file there is replaced.", show_default=False)],
    tenant: Tenant = None,
    data_dir: options.DataDir = None,
    store: options.Store = None,
) -> None:
    """Write all sessions, responses, conversations and named states into one file."""
    if not file.absolute().parent.is_dir():
        raise typer.BadParameter(f"there is no directory {file.parent}", param_hint="'FILE'")
    tally = Tally()
    asyncio.run(_backup(source_settings(data_dir, store), file.absolute(), tenant, tally))
    tally.show(f"backup {file}")


async def _backup(settings: Settings, file: Path, tenant: str | None, tally: Tally) -> None:
    from service.transfer.backup import all_sessions
    from service.transfer.backup import backup as run

    async with opened_store(settings) as opened:
        names = await all_sessions(opened, tenant=tenant)
        await _follow(run(opened, names, file, tenant=tenant), tally, label="backup", total=len(names))


def restore(
    file: Annotated[Path, typer.Argument(help="File written by `nsm sessions backup`.", show_default=False)],
    tenant: Tenant = None,
    overwrite: Overwrite = False,
    data_dir: options.DataDir = None,
    store: options.Store = None,
) -> None:
    """Restore a backup into a store."""
    tally = Tally()
    settings = target_settings(data_dir, store)
    with file.open("rb") as raw:
        asyncio.run(_restore(settings, raw, file.stat().st_size, tenant, overwrite, tally))
    tally.show(f"restore {file}")


async def _restore(
    settings: Settings, raw: BinaryIO, num_bytes: int, tenant: str | None, is_overwriting: bool, tally: Tally
) -> None:
    from service.transfer.backup import restore as run

    async with opened_store(settings) as opened:
        steps = run(opened, raw, tenant=tenant, is_overwriting=is_overwriting)
        await _follow(steps, tally, label="restore", total=num_bytes)


def copy(
    source: Annotated[str | None, typer.Option("--from", help="URL of a store.", show_default="NSM_STORE")] = None,
    target: Annotated[str | None, typer.Option("--to", help="URL of a store.", show_default="NSM_STORE")] = None,
    tenant: Tenant = None,
    overwrite: Overwrite = False,
    data_dir: options.DataDir = None,
) -> None:
    """Copy all sessions, responses, conversations and named states from one store into another."""
    from nsm_core.errors import ConfigError

    settings = (source_settings(data_dir, source), target_settings(data_dir, target))
    stores = [(one.store if one.is_redis else one.store_name()) for one in settings]
    if stores[0] == stores[1]:
        raise ConfigError(f"--from and --to are the same store, {settings[0].store_name()}")
    tally = Tally()
    asyncio.run(_copy(*settings, tenant, overwrite, tally))
    tally.show(f"copy to {settings[1].store_name()}")


async def _copy(source: Settings, target: Settings, tenant: str | None, is_overwriting: bool, tally: Tally) -> None:
    from service.transfer.backup import all_sessions, copy_sessions

    async with opened_store(source) as from_store, opened_store(target) as to_store:
        names = await all_sessions(from_store, tenant=tenant)
        steps = copy_sessions(from_store, to_store, names, tenant=tenant, is_overwriting=is_overwriting)
        await _follow(steps, tally, label="copy", total=len(names))


async def _follow(steps: AsyncGenerator[TransferResult], tally: Tally, *, label: str, total: int) -> None:
    """Counts and shows progress. `total`: sessions, or bytes if the steps report bytes."""
    from nsm_core.errors import NsmError

    try:
        with progress(label, total) as advance:
            async with contextlib.aclosing(steps):
                async for result in steps:
                    tally.add(result)
                    advance(result.num_bytes_read or tally.num_sessions)
    except NsmError as error:
        raise NsmError(f"{error.with_notes()}; until there: {tally}") from error


class Tally:
    """Outcomes by number of sessions, documents and named states."""

    def __init__(self) -> None:
        self._counts: dict[What, Counter[Outcome]] = {what: Counter() for what in ("session", "document", "state")}
        self._odd: list[TransferResult] = []

    @property
    def num_sessions(self) -> int:
        return self._counts["session"].total()

    def add(self, result: TransferResult) -> None:
        self._counts[result.what][result.outcome] += 1
        if result.outcome in ("exists", "failed"):
            self._odd.append(result)

    def show(self, title: str) -> None:
        """The counts; on standard error the failures, and exit status 1 after one."""
        for result in self._odd:
            said = SAID_OF_STATE if (result.what, result.outcome) == ("state", "exists") else SAID[result.outcome]
            reason = said if result.error is None else f"{said}: {result.error.with_notes()}"
            note(f"{result.name.tenant}/{result.name.session_id}: {reason}")
        print(f"{title}: {self}")
        if any(counts["failed"] for counts in self._counts.values()):
            raise typer.Exit(1)

    def __str__(self) -> str:
        names: dict[What, str] = {"document": "documents", "state": "named states"}
        more = (f"; {name}: {_counted(self._counts[what])}" for what, name in names.items() if self._counts[what])
        return (_counted(self._counts["session"]) or "no sessions") + "".join(more)


def _counted(counts: Counter[Outcome]) -> str:
    words = {outcome: said.partition(":")[0] for outcome, said in SAID.items()}
    return ", ".join(f"{counts[name]} {word}" for name, word in words.items() if counts[name])
