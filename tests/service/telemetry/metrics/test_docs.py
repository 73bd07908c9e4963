"""docs/metrics.md names every metric there is, and no other."""

from __future__ import annotations

import re
from pathlib import Path

from service.backends.base import UpstreamStats
from service.telemetry.metrics.metrics import Metrics
from service.telemetry.metrics.supervisor import SupervisorMetrics
from tests.support.fakes import FakeBackend

PAGE = Path(__file__).parents[4] / "docs" / "metrics.md"


def kind_of(name: str, cell: str) -> str:
    """As the page marks kinds; `cell`: of the row's names."""
    if name.endswith("_total"):
        return "counter"
    return "histogram" if cell.endswith(" H") else "gauge"


def test_page_lists_every_metric() -> None:
    metrics = Metrics(FakeBackend())
    metrics.watch_redis_pool(lambda: 0)
    stats = UpstreamStats(num_up=1, num_down=0, num_failovers=0, num_state_hits=0, num_state_misses=0)
    metrics.watch_upstreams(lambda: stats)
    metrics.watch_devices(list)
    SupervisorMetrics(metrics.registry)
    there = {
        family.name + ("_total" if family.type == "counter" else ""): family.type
        for family in metrics.registry.collect()
    }
    documented = {}
    for line in PAGE.read_text("utf-8").splitlines():
        names, *rest = line.split(" | ")
        if line.startswith("| `nsm_") and len(rest) == 1:
            documented |= {name: kind_of(name, names) for name in re.findall(r"`(nsm_\w+)", names)}
    assert documented == there
