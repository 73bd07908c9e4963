"""Results as a benchmark would have written them."""

from __future__ import annotations

from typing import Any

from nsm_lab.bench.result import BenchResult, Measure


def made_result(*measures: Measure, **changes: Any) -> BenchResult:
    fields: dict[str, Any] = {
        "kind": "engine",
        "command": "nsm bench engine",
        "commit": "0123456789ab",
        "created": "2026-01-01T00:00:00+00:00",
        "machine": {"cpu": "one", "num_cpus": 2, "memory_mb": 1024, "system": "Linux x86_64", "load": 0.0},
        "versions": {"python": "3.11"},
        "subject": {"model": "small"},
        "options": {"repeats": 2},
        "measures": measures or (Measure("decode.1.tokens_per_s", (1.0, 2.0)),),
    }
    return BenchResult(**{**fields, **changes})
