from __future__ import annotations

import importlib.metadata
from typing import NoReturn

import pytest

from nsm_core.distribution import version_of
from service.app import create_app
from service.settings import Settings
from service.stores.sessions.sqlite import SqliteSessionStore
from tests.support.fakes import FakeBackend


def test_application_without_metadata_of_its_package_has_an_unknown_version(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(package: str) -> NoReturn:
        raise importlib.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(importlib.metadata, "version", version)
    version_of.cache_clear()
    try:
        assert create_app(Settings(), FakeBackend(), SqliteSessionStore(None)).version == "unknown"
    finally:
        version_of.cache_clear()
