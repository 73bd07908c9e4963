from __future__ import annotations

from nsm_core.stats import StateCacheStats
from nsm_core.triton.state_cache import StateCache


def test_the_least_recently_used_state_goes_first() -> None:
    cache = StateCache(10)
    cache.put("a", b"1234")
    cache.put("b", b"5678")
    assert cache.get("a") == b"1234"
    cache.put("c", b"9999")
    assert cache.get("b") is None
    assert (cache.get("a"), cache.get("c")) == (b"1234", b"9999")
    assert cache.stats() == StateCacheStats(
        num_states=2, num_bytes=8, max_bytes=10, num_hits=3, num_misses=1, num_evicted=1
    )


def test_putting_a_state_again_refreshes_it() -> None:
    cache = StateCache(8)
    cache.put("a", b"1234")
    cache.put("b", b"5678")
    cache.put("a", b"1234")
    cache.put("c", b"9999")
    assert cache.get("b") is None
    assert cache.stats().num_bytes == 8


def test_a_state_larger_than_all_the_room_is_not_kept() -> None:
    cache = StateCache(3)
    cache.put("a", b"123")
    cache.put("b", b"1234")
    assert cache.get("a") == b"123"
    assert cache.get("b") is None
