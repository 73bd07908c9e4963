"""The session store that a command works on."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from service.settings import Settings
    from service.stores.sessions.base import SessionStore


def store_settings(
    data_dir: Path | None, store: str | None, *, model: Path | None = None, device: str | None = None
) -> Settings:
    """For commands that read single sessions. A file or directory that the command line or NSM_STORE names must have
    a store; the default one need not. Raises ConfigError.
    """
    settings = target_settings(data_dir, store, model=model, device=device)
    is_default = data_dir is None or data_dir.is_file()  # a file is no directory: the store has the words for that
    return settings if settings.store == "sqlite" and is_default else _require_file(settings)


def source_settings(
    data_dir: Path | None, store: str | None, *, model: Path | None = None, device: str | None = None
) -> Settings:
    """For commands that read a whole store, which must exist. Raises ConfigError."""
    return _require_file(target_settings(data_dir, store, model=model, device=device))


def _require_file(settings: Settings) -> Settings:
    from nsm_core.errors import ConfigError

    path = settings.database_path()
    if path is not None and not path.exists():
        raise ConfigError(f"there is no session store {path}")
    return settings


def target_settings(
    data_dir: Path | None,
    store: str | None,
    *,
    model: Path | None = None,
    device: str | None = None,
    num_threads: int | None = None,
) -> Settings:
    """For commands that may begin a store.

    Raises ConfigError for a memory store, which other processes cannot read.
    """
    from nsm_core.errors import ConfigError
    from service.settings import load_settings

    settings = load_settings(data_dir=data_dir, store=store, model=model, device=device, num_threads=num_threads)
    if settings.store == "memory":
        raise ConfigError(
            "sessions of a memory store are in the server's process; NSM_STORE=sqlite keeps them in a file"
        )
    return settings


@contextlib.asynccontextmanager
async def opened_store(settings: Settings) -> AsyncIterator[SessionStore]:
    from service.stores.sessions.factory import make_store
    from service.transfer.damage import unreadable_store

    store = make_store(settings)
    with unreadable_store():
        await store.open()
    try:
        yield store
    finally:
        await store.close()
