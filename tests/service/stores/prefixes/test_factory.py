"""Prefixes are stored in memory for one process and in Redis for several."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nsm_core.errors import ConfigError
from service.settings import Settings, load_settings
from service.stores.prefixes.base import PrefixBounds
from service.stores.prefixes.factory import bounds_of, make_prefix_store
from service.stores.prefixes.memory import MemoryPrefixStore
from service.stores.prefixes.redis import RedisPrefixStore

MIB = 2**20


@pytest.mark.parametrize(
    ("store", "kind"),
    [
        ("memory", MemoryPrefixStore),
        ("sqlite", MemoryPrefixStore),
        ("sqlite:///elsewhere/sessions.db", MemoryPrefixStore),
        ("redis://localhost", RedisPrefixStore),
    ],
)
def test_prefix_store_is_redis_only_beside_sessions_in_redis(store: str, kind: type, tmp_path: Path) -> None:
    assert isinstance(make_prefix_store(Settings(data_dir=tmp_path, store=store)), kind)


@pytest.mark.parametrize(
    ("fields", "bounds"),
    [
        ({}, PrefixBounds(max_bytes=512 * MIB, max_tenant_bytes=512 * MIB, ttl_s=3600.0)),
        (
            {"prefix_cache_mb": 10, "prefix_cache_tenant_mb": 3, "prefix_cache_ttl_s": 5.0},
            PrefixBounds(max_bytes=10 * MIB, max_tenant_bytes=3 * MIB, ttl_s=5.0),
        ),
        ({"prefix_cache_mb": 2, "prefix_cache_tenant_mb": 3}, PrefixBounds(
            max_bytes=2 * MIB, max_tenant_bytes=2 * MIB, ttl_s=3600.0
        )),
    ],
)  # fmt: skip
def test_bounds_come_from_the_settings(fields: dict[str, Any], bounds: PrefixBounds) -> None:
    assert bounds_of(Settings(**fields)) == bounds


def test_the_switch_reads_on_and_off(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, is_on in (("on", True), ("off", False)):
        monkeypatch.setenv("NSM_PREFIX_CACHE", text)
        assert load_settings().prefix_cache is is_on
    monkeypatch.setenv("NSM_PREFIX_CACHE", "maybe")
    with pytest.raises(ConfigError, match="NSM_PREFIX_CACHE"):
        load_settings()
