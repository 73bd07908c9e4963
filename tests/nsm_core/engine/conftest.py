"""Engines that wait for every step, and engines whose steps overlap."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from nsm_core.execution.eager import EagerExecutor
from nsm_core.sampling.device import PendingTokens
from tests.nsm_core.engine import harness
from tests.nsm_core.engine.overlap_pairs import RecordingExecutor


@pytest.fixture(scope="module", params=["waiting", "overlapped"])
def waiting_or_overlapped(request: pytest.FixtureRequest) -> Iterator[None]:
    """The default executor of `make_engine`."""
    with pytest.MonkeyPatch.context() as patch:
        is_overlapped = request.param == "overlapped"
        patch.setattr(harness, "default_executor", harness.overlapped() if is_overlapped else EagerExecutor)
        yield


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    wait = PendingTokens.wait
    monkeypatch.setattr(RecordingExecutor, "notes", found, raising=False)

    def noting_wait(tokens: PendingTokens) -> list[int]:
        found.append("wait")
        return wait(tokens)

    monkeypatch.setattr(PendingTokens, "wait", noting_wait)
    return found
