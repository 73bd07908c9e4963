"""From the settings to a store."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from nsm_core.errors import ConfigError
from service.settings import Settings
from service.stores.sessions.sqlite import SqliteSessionStore

if TYPE_CHECKING:
    from service.stores.sessions.redis import RedisSessionStore


def make_store(settings: Settings) -> SqliteSessionStore | RedisSessionStore:
    """The store that the settings name; a new kind of store is a new case here.

    Raises ConfigError for a bad URL, or a path that cannot be used.
    """
    if settings.is_redis:
        from service.stores.redis.url import parse_redis_url  # its library takes a fifth of a second to import
        from service.stores.sessions.redis import RedisSessionStore

        return RedisSessionStore(parse_redis_url(settings.store))
    path = settings.database_path()
    if path is not None:  # else in memory
        require_directory(path)
    return SqliteSessionStore(path)


def require_directory(path: Path) -> None:
    """Raises ConfigError if the directory of the store's file is not there and cannot be made, or is read-only."""
    directory = path.parent
    there = next(path for path in (directory, *directory.parents) if os.path.lexists(path))
    if there.is_dir():
        fault = None if os.access(there, os.W_OK | os.X_OK) else "not writable"
    else:
        fault = "a symbolic link to nothing" if there.is_symlink() else "not a directory"
    if fault is not None:
        where = f"{directory} (NSM_DATA_DIR, NSM_STORE)"
        message = f"sessions cannot be stored in {where}: {there} is {fault}"
        if os.path.exists(path):
            message = (
                f"the session store {path.name} cannot be opened in {where}: {there} is {fault}, and a command that "
                f"only reads needs files beside it too; copy {path.name}* to a directory that is, and name that"
            )
        raise ConfigError(message)
