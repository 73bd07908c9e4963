"""Prefixes are stored in memory for one process and in Redis for several."""

from __future__ import annotations

from pathlib import Path

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


def test_prefix_bounds_come_from_the_setting() -> None:
    assert bounds_of(Settings()) == PrefixBounds(max_bytes=128 * MIB, ttl_s=3600.0)
    assert bounds_of(Settings(prefix_cache_mb=10)).max_bytes == 10 * MIB


def test_prefix_cache_is_off_without_a_size() -> None:
    with pytest.raises(ConfigError, match="NSM_PREFIX_CACHE_MB"):
        load_settings(prefix_cache_mb=-1)
    assert load_settings(prefix_cache_mb=0).prefix_cache_mb == 0
