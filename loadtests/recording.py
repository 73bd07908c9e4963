"""Where samples go: to Locust's own statistics, and one by one to a file, from whichever process made them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import IO, Any

from locust.env import Environment
from locust.runners import MasterRunner, WorkerRunner

from loadtests.samples import Sample

REPORTED = "samples"  # key in a worker's reports


class NotOk(Exception):
    """What Locust's tables show for an answer that was not `ok`."""


class Recorder:
    """One for each process. A worker sends its samples to the master, which writes them; a single process writes."""

    def __init__(self, environment: Environment, path: Path | None) -> None:
        self.samples: list[Sample] = []
        self._environment = environment
        self._pending: list[Sample] = []
        self._is_worker = isinstance(environment.runner, WorkerRunner)
        self._file: IO[str] | None = None if path is None or self._is_worker else path.open("w", encoding="utf-8")
        if self._is_worker:
            environment.events.report_to_master.add_listener(self._report)
        elif isinstance(environment.runner, MasterRunner):
            environment.events.worker_report.add_listener(self._receive)

    def add(self, sample: Sample) -> None:
        self._fire(sample)
        if self._is_worker:
            self._pending.append(sample)
        else:
            self._keep(sample)

    @property
    def directory(self) -> Path | None:
        """Of the file with the samples; None in a worker, and where there is no such file."""
        return None if self._file is None else Path(self._file.name).parent

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _keep(self, sample: Sample) -> None:
        self.samples.append(sample)
        if self._file is not None:
            self._file.write(sample.to_json() + "\n")

    def _report(self, data: dict[str, Any], **_: object) -> None:
        data[REPORTED], self._pending = [dataclasses.asdict(sample) for sample in self._pending], []

    def _receive(self, data: dict[str, Any], **_: object) -> None:
        for fields in data.get(REPORTED, ()):
            self._keep(Sample(**fields))

    def _fire(self, sample: Sample) -> None:
        """Locust has one number for each event, titled milliseconds; the request type names the real unit."""
        name = f"{sample.scenario} {sample.step}".strip()
        fire = self._environment.events.request.fire

        def event(kind: str, value: float, problem: str = "") -> None:
            error = NotOk(problem) if problem else None
            fire(request_type=kind, name=name, response_time=value, response_length=0, exception=error, context={})

        is_fine = sample.outcome in ("ok", "busy", "cancelled")
        event("E2E", sample.e2e_ms or 0.0, "" if is_fine else f"{sample.outcome}: {sample.problem[:80]}")
        if sample.ttft_ms is not None:
            event("TTFT", sample.ttft_ms)
        for gap_ms in sample.itl_ms:
            event("ITL", gap_ms)
        if sample.tokens_per_s is not None:
            event("tokens/s", sample.tokens_per_s)
        if sample.prompt_tokens:
            event("resumed tokens", sample.resumed_tokens)
