"""Shared by the commands of nsm_lab."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from nsm_core.errors import ConfigError

OWN_PACKAGES = ("nsm_core", "nsm_lab", "service")


@contextlib.contextmanager
def lab_command() -> Iterator[None]:
    """Around a command that uses nsm_lab. Raises ConfigError that names the extra where one of its packages lacks."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith(OWN_PACKAGES):
            raise
        raise ConfigError(
            f"this command needs {error.name}: pip install 'nsm-serve[lab]', or in a checkout make setup"
        ) from error
