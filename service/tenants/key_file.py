"""Adds a key to the file of keys, whose tenant is declared there if it was not."""

from __future__ import annotations

import contextlib
import datetime
import os
import stat
import tempfile
from pathlib import Path

from nsm_core.errors import ConfigError, reason_of
from service.tenants.api_keys import ApiKey, parse_keys

NEW_FILE_MODE = 0o600


def add_key(path: Path, entry: ApiKey, made_on: datetime.date) -> None:
    """The file is replaced whole, by one rename, and what stands in it stays. One that is missing or empty is begun.

    Raises ConfigError, and leaves the file as it was, where a server could not use what there is or would be.
    """
    path = path.resolve()  # a link stays one
    try:
        text = path.read_text("utf-8") if path.exists() else ""
        mode = stat.S_IMODE(path.stat().st_mode) if path.exists() else NEW_FILE_MODE
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the API keys in {path}: {reason_of(error)}") from error
    is_declared = bool(text.strip()) and entry.tenant in parse_keys(text, path, allow_none=True).tenants
    parts = [text.rstrip("\n")] if text.strip() else []
    if not is_declared:
        parts.append(tenant_line(entry.tenant))
    new_text = "\n\n".join([*parts, key_lines(entry, made_on)])
    parse_keys(new_text, path)
    try:
        _replace(path, new_text, mode)
    except OSError as error:
        raise ConfigError(f"cannot write the API keys to {path}: {reason_of(error)}") from error


def tenant_line(tenant: str) -> str:
    """What declares a tenant without limits."""
    return f"[tenants.{tenant}]"


def key_lines(entry: ApiKey, made_on: datetime.date) -> str:
    """The entry as it stands in the file."""
    lines = [f"[[keys]]  # made on {made_on}", f'id = "{entry.id}"', f'tenant = "{entry.tenant}"']
    lines += [f'sha256 = "{entry.sha256}"', *(["metrics = true"] if entry.metrics else [])]
    return "\n".join(lines) + "\n"


def _replace(path: Path, text: str, mode: int) -> None:
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            os.fchmod(file.fileno(), mode)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
        raise
