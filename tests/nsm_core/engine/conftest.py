"""Engines that wait for every step, and engines that look ahead."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from nsm_core.execution.eager import EagerExecutor
from tests.nsm_core.engine import harness


@pytest.fixture(scope="module", params=["waiting", "ahead"])
def waiting_or_ahead(request: pytest.FixtureRequest) -> Iterator[None]:
    """What `make_engine` makes when it is not told how."""
    with pytest.MonkeyPatch.context() as patch:
        is_ahead = request.param == "ahead"
        patch.setattr(harness, "default_executor", harness.looking_ahead() if is_ahead else EagerExecutor)
        yield
