"""The session store that a command works on."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from service.sessions.base import SessionStore
    from service.settings import Settings


def store_settings(data_dir: Path | None, store: str | None, *, model: Path | None = None) -> Settings:
    """Raises ConfigError for a store in a server's memory, which no other process can look into."""
    from nsm_core.errors import ConfigError
    from service.settings import load_settings

    settings = load_settings(data_dir=data_dir, store=store, model=model)
    if settings.store == "memory":
        raise ConfigError(
            "sessions of a memory store are in the server's process; NSM_STORE=sqlite keeps them in a file"
        )
    return settings


@contextlib.asynccontextmanager
async def opened_store(settings: Settings) -> AsyncIterator[SessionStore]:
    from service.sessions.factory import make_store

    store = make_store(settings)
    await store.open()
    try:
        yield store
    finally:
        await store.close()
