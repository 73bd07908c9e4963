from __future__ import annotations

from prometheus_client import CollectorRegistry, Histogram, generate_latest

from service.telemetry.metrics.fast_histogram import FastHistogram

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
