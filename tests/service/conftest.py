"""A file of keys, and a key of a tenant."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.tenants import TestKey, make_key


@pytest.fixture
def keys_file(tmp_path: Path) -> Path:
    """Where it is to be; not there yet."""
    return tmp_path / "keys.toml"


@pytest.fixture
def acme() -> TestKey:
    return make_key("acme")
