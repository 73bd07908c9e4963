"""Checks that PEM files hold the expected keys and certificates, before a process that needs them starts."""

from __future__ import annotations

import ssl
from pathlib import Path

from nsm_core.errors import ConfigError, reason_of


def check_ca(ca: Path) -> None:
    """Raises ConfigError: the file is missing or holds no certificate."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(ca)
    except OSError as error:
        raise ConfigError(f"{ca} is no file with certificates of a CA: {reason_of(error)}") from error


def check_pair(cert: Path, key: Path) -> None:
    """Raises ConfigError: a file is missing, holds something else, is locked, or the key is not the certificate's."""
    try:
        # without a password, an encrypted key would ask the terminal
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_cert_chain(cert, key, password="")
    except OSError as error:
        raise ConfigError(f"{cert} and {key} are no certificate and its key: {reason_of(error)}") from error
