"""Engines that wait for every step, and engines that look ahead."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from nsm_core.execution.eager import EagerExecutor
from nsm_core.sampling.device import LaunchedTokens
from tests.nsm_core.engine import harness
from tests.nsm_core.engine.overlap_pairs import Noting


@pytest.fixture(scope="module", params=["waiting", "ahead"])
def waiting_or_ahead(request: pytest.FixtureRequest) -> Iterator[None]:
    """What `make_engine` makes when it is not told how."""
    with pytest.MonkeyPatch.context() as patch:
        is_ahead = request.param == "ahead"
        patch.setattr(harness, "default_executor", harness.looking_ahead() if is_ahead else EagerExecutor)
        yield


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    wait = LaunchedTokens.wait
    monkeypatch.setattr(Noting, "notes", found, raising=False)

    def noting_wait(tokens: LaunchedTokens) -> list[int]:
        found.append("wait")
        return wait(tokens)

    monkeypatch.setattr(LaunchedTokens, "wait", noting_wait)
    return found
