"""A running benchmark: records the machine before the first repeat, makes the result after the last."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from nsm_lab.bench.machine import machine
from nsm_lab.bench.result import BenchResult, collect
from nsm_lab.provenance import command_line, source_commit, utc_now, versions


@dataclasses.dataclass(frozen=True, slots=True)
class BenchRun:
    """Created before anything is measured, so that the recorded load is that of other programs."""

    kind: str
    created: str = dataclasses.field(default_factory=utc_now)
    machine: Mapping[str, Any] = dataclasses.field(default_factory=machine)

    def result(
        self, repeats: Iterable[Mapping[str, float]], *, subject: Mapping[str, Any], options: Mapping[str, Any]
    ) -> BenchResult:
        """`repeats`: the figures of each; `subject`, `options`: see BenchResult."""
        return BenchResult(
            kind=self.kind,
            command=command_line(),
            commit=source_commit(),
            created=self.created,
            machine=self.machine,
            versions=versions(),
            subject=subject,
            options=options,
            measures=collect(repeats),
        )
