"""The server of the gateway's benchmarks, which has an engine that computes nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.gateway_cost import ENDPOINTS, Server, read_streams

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("is_split", [False, True])
async def test_every_endpoint_streams_its_tokens(is_split: bool) -> None:
    server = Server("this", ROOT, 0.0, is_split=is_split)
    try:
        for endpoint in ENDPOINTS:
            assert await read_streams(server, endpoint, 2, 8) > 0
        assert min(server.clocks().values()) > 0
    finally:
        server.stop()
