"""Two processes whose metrics are one."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import pytest
from prometheus_client.parser import text_string_to_metric_families

from service.telemetry.metrics import shared

REPOSITORY = Path(__file__).parents[4]
PROCESS = textwrap.dedent(
    """
    import asyncio, dataclasses, sys
    from nsm_core.stats import EnergyUse
    from service.telemetry.metrics.metrics import Metrics
    from service.telemetry.metrics.shared import sharing
    from tests.support.fakes import FakeBackend

    async def main():
        backend, number = FakeBackend(), int(sys.argv[1])
        backend._stats = dataclasses.replace(
            backend._stats, tokens_generated=10 * number, num_waiting=number,
            energy=(EnergyUse(source="cpu", method="estimate", joules=0.5 * number),),
        )
        metrics = Metrics(backend)
        async with sharing(metrics.refresh):
            for _ in range(number):
                metrics.requests.start(arrival=0.0).finish("stop")
            metrics.sessions.turn_detached(1)
            await asyncio.sleep(0)
            print("ready", flush=True)
            for line in sys.stdin:
                if line == "scrape\\n":
                    print(metrics.render().decode() + "END", flush=True)
                else:
                    return

    asyncio.run(main())
    """
)


class Process:
    """One that counts `number` requests."""

    def __init__(self, number: int, folder: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", PROCESS, str(number)],
            env={**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(folder)},
            cwd=REPOSITORY,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def begun(self) -> Process:
        while (line := self._out.readline()) != "ready\n":
            assert line
        return self

    @property
    def _out(self) -> IO[str]:
        assert self._process.stdout is not None
        return self._process.stdout

    def scrape(self) -> dict[tuple[str, ...], float]:
        self._say("scrape\n")
        lines: list[str] = []
        while (line := self._out.readline()) != "END\n":
            assert line
            lines.append(line)
        return {
            (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
            for family in text_string_to_metric_families("".join(lines))
            for sample in family.samples
        }

    def stop(self) -> None:
        self._say("stop\n")
        assert self._process.wait(60) == 0

    def kill(self) -> None:
        """Also after it has stopped."""
        self._process.kill()
        self._process.communicate()

    def _say(self, word: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(word)
        self._process.stdin.flush()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[int], Process]]:
    processes: list[Process] = []

    def start(number: int) -> Process:
        processes.append(Process(number, tmp_path))
        return processes[-1].begun()

    yield start
    for process in processes:
        process.kill()


def test_whichever_process_is_asked_answers_for_all(start: Callable[[int], Process]) -> None:
    first, second = start(1), start(2)
    for process in (first, second):
        samples = process.scrape()
        assert samples["nsm_request_success_total", "stop"] == 3
        assert samples["nsm_e2e_request_latency_seconds_count",] == 3
        assert samples["nsm_generation_tokens_total",] == 30
        assert samples["nsm_energy_joules_total", "estimate", "cpu"] == 1.5
        assert samples["nsm_num_requests_waiting",] == 3
        assert samples["nsm_turns_detached",] == 2
        assert samples["nsm_max_slots",] == 32
        assert samples["nsm_model_info", "fake-fingerprint", "fake-nsm", "fake"] == 1
    second.kill()  # what it did stays done, what it held is held no more
    samples = first.scrape()
    assert samples["nsm_request_success_total", "stop"] == 3
    assert samples["nsm_num_requests_waiting",] == samples["nsm_turns_detached",] == 1
    third = start(4)
    first.stop()
    samples = third.scrape()
    assert samples["nsm_request_success_total", "stop"] == 7
    assert samples["nsm_num_requests_waiting",] == 4
    third.stop()


def test_alone_nothing_is_shared() -> None:
    assert not shared.is_shared()


@pytest.mark.parametrize("name", ["gauge_livesum_123.db", "gauge_livemax_123.db"])
def test_the_library_still_names_its_files_so(name: str) -> None:
    found = shared._LIVE_FILE.fullmatch(name)
    assert found is not None
    assert found[1] == "123"
