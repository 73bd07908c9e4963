"""Which tests each tier runs: `make test-fast`, `make test`, `make soak`.

`fast` needs only the environment: no service, no browser, no server process, no kernels in their interpreter. `test`
adds at least one test of each real service. `soak` runs everything, with full counts. tests/tiers.toml places the
exceptions; `make test PYTEST_ARGS=--durations=0` shows the times that justify them.
"""

from __future__ import annotations

import enum
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "tests" / "tiers.toml"
SERVICES = frozenset(
    {
        "chromium",
        "client_generator",
        "control_group",
        "gpu",
        "haproxy",
        "image",
        "nginx",
        "perf_analyzer",
        "prometheus",
        "redis",
        "tmpfs",
        "triton",
    }
)


class Tier(enum.IntEnum):
    """Each tier runs the tests of those before it."""

    FAST = 1
    TEST = 2
    SOAK = 3


class Tiers:
    """The table: prefixes of test ids, of which the longest counts."""

    def __init__(self, table: dict[str, list[str]]) -> None:
        self._tier_of = {prefix: Tier[name.upper()] for name, prefixes in table.items() for prefix in prefixes}

    @classmethod
    def load(cls) -> Tiers:
        return cls(tomllib.loads(TABLE.read_text("utf-8")))

    @property
    def prefixes(self) -> frozenset[str]:
        return frozenset(self._tier_of)

    def of(self, item: pytest.Item) -> Tier:
        """The first tier that runs a test."""
        markers = {marker.name for marker in item.iter_markers()}
        tier = self.of_id(item.nodeid)
        if "slow" in markers:
            return Tier.SOAK
        return max(tier, Tier.TEST) if markers & SERVICES else tier

    def may_hold(self, path: str, last: Tier) -> bool:
        """Whether a file or folder has tests of the tiers up to `last`."""
        inside = [tier for prefix, tier in self._tier_of.items() if is_below(prefix, path)]
        return min([self.of_id(path), *inside]) <= last

    def of_id(self, test_id: str) -> Tier:
        matching = [prefix for prefix in self._tier_of if is_below(test_id, prefix)]
        return self._tier_of[max(matching, key=len)] if matching else Tier.TEST


def is_below(test_id: str, prefix: str) -> bool:
    """Whether a prefix names the test, its parameters, its file or one of its folders."""
    return test_id == prefix or (test_id.startswith(prefix) and test_id[len(prefix)] in "/:[")
