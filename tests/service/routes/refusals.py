"""What a refusal must be like, on a gateway with the fake backend."""

from __future__ import annotations

from typing import Any

import httpx

from tests.support.gateway import Gateway, error_of


async def assert_refused(server: Gateway, response: httpx.Response, status: int, words: list[str]) -> dict[str, Any]:
    """It was refused as it should be, and the next request is served as if nothing had been."""
    assert response.status_code == status, response.text
    error = error_of(response)
    assert [word for word in words if word not in error["message"]] == [], error["message"]
    assert len(error["message"]) < 400
    good = await server.client.post("/v1/completions", json={"prompt": "hello", "max_tokens": 2})
    assert good.json()["choices"][0]["text"] == "It was"
    return error
