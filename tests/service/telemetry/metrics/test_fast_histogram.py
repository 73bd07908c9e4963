from __future__ import annotations

from pathlib import Path

from prometheus_client import CollectorRegistry, Histogram, generate_latest

from service.telemetry.metrics.fast_histogram import FastHistogram, repeated_histogram
from service.telemetry.metrics.shared import render, sharing_in

BUCKETS = (0.001, 0.01, 0.1)


def test_it_tells_what_the_librarys_histogram_tells() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    fast = FastHistogram("gap_seconds", "Gaps.", buckets=BUCKETS, registry=ours)
    slow = Histogram("gap_seconds", "Gaps.", buckets=BUCKETS, registry=theirs)
    fast.observe(0.0, 3)
    for value in (0.0, 0.0, 0.0, 0.001, 0.05, 7.0):
        slow.observe(value)
    for value in (0.001, 0.05, 7.0):
        fast.observe(value)
    want = [line for line in generate_latest(theirs).decode().splitlines() if "_created" not in line]
    assert generate_latest(ours).decode().splitlines() == want


def test_shared_numbers_are_the_librarys_after_a_refresh(tmp_path: Path) -> None:
    with sharing_in(tmp_path):
        registry = CollectorRegistry()
        shared = repeated_histogram("gap_seconds", "Gaps.", buckets=BUCKETS, registry=registry)
        theirs = Histogram("other_seconds", "Gaps.", buckets=BUCKETS, registry=registry)
        for _ in range(2):
            for value in (0.0, 0.0078125, 0.0625, 0.125, 5.0):
                shared.observe(value, 3)
                for _ in range(3):
                    theirs.observe(value)
            shared.refresh()
        found = render(registry, lambda: None).decode()
    ours, other = (
        [line.removeprefix(name) for line in found.splitlines() if line.startswith(f"{name}_seconds")]
        for name in ("gap", "other")
    )
    assert len(ours) == len(BUCKETS) + 3
    assert ours == other
