"""States whose checksums are right and whose numbers are no model's, on a real engine."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from nsm_core.state.layout import FLOAT
from nsm_core.state.snapshot import Snapshot
from service.state.copies import read_copy
from service.stores.sessions.base import NewSession
from service.stores.sessions.key import SessionKey
from service.transfer.session_file import write_file
from tests.support.backends import MakeBackend
from tests.support.gateway import FILE_HEADERS, Gateway, error_of, gateway

TURN = {"input": "Once", "max_tokens": 8, "temperature": 0, "ignore_eos": True}


@pytest.fixture
async def server(make_backend: MakeBackend) -> AsyncIterator[Gateway]:
    """Two sessions of the same turn."""
    async with gateway(make_backend(), snapshot_tokens=0, state_cache_mb=0) as opened:
        for session_id in ("s1", "s2"):
            await opened.client.post("/v1/sessions", json={"id": session_id})
            assert (await say(opened, session_id))["session"]["version"] == 1
        yield opened


async def say(server: Gateway, session_id: str) -> dict[str, Any]:
    response = await server.client.post(f"/v1/sessions/{session_id}/generate", json=TURN)
    assert response.status_code == 200, response.text
    return dict(response.json())


async def file_with(server: Gateway, value: float) -> bytes:
    """The export of s1 with one number replaced, and every checksum made again."""
    copy = await read_copy(server.services.store, SessionKey("default", "s1"))
    assert copy.snapshot is not None
    return write_file(
        dataclasses.replace(copy, snapshot=with_number(Snapshot.decode(copy.snapshot), value).encode()),
        tokenizer_fingerprint="",
    )


def with_number(snapshot: Snapshot, value: float) -> Snapshot:
    layout = snapshot.header.layout
    index = next(index for index, tensor in enumerate(layout) if tensor.dtype == FLOAT)
    start = sum(tensor.num_bytes for tensor in layout[:index])
    state = snapshot.state[:start] + np.float32(value).tobytes() + snapshot.state[start + 4 :]
    return Snapshot(snapshot.header, state)


@pytest.mark.parametrize("value", [np.nan, 3e38])
async def test_a_file_with_such_a_state_is_refused(server: Gateway, value: float) -> None:
    raw = await file_with(server, value)
    response = await server.client.post("/v1/sessions/import?id=s3", content=raw, headers=FILE_HEADERS)
    assert (response.status_code, error_of(response)["code"]) == (400, "invalid_session_file")
    assert "not finite, or larger" in error_of(response)["message"]
    assert (await server.client.get("/v1/sessions/s3")).status_code == 404
    good = await server.client.post(
        "/v1/sessions/import?id=s3", content=await file_with(server, 0.5), headers=FILE_HEADERS
    )
    assert good.status_code == 200, good.text


async def test_a_file_whose_state_is_elsewhere_than_it_says_is_refused(server: Gateway) -> None:
    copy = await read_copy(server.services.store, SessionKey("default", "s1"))
    assert copy.snapshot is not None
    snapshot = Snapshot.decode(copy.snapshot)
    changed = Snapshot(snapshot.header, (99).to_bytes(8, "little") + snapshot.state[8:])
    raw = write_file(dataclasses.replace(copy, snapshot=changed.encode()), tokenizer_fingerprint="")
    response = await server.client.post("/v1/sessions/import?id=s3", content=raw, headers=FILE_HEADERS)
    assert response.status_code == 400
    assert "reached by 99 tokens" in error_of(response)["message"]


@pytest.mark.parametrize("value", [np.nan, 3e38])
async def test_a_stored_state_that_is_no_models_is_made_again_from_the_log(server: Gateway, value: float) -> None:
    store = server.services.store
    copy = await read_copy(store, SessionKey("default", "s1"))
    await store.delete(SessionKey("default", "s1"))
    assert copy.snapshot is not None
    new = NewSession(
        key=SessionKey("default", "s1"),
        model_fingerprint=copy.head.model_fingerprint,
        metadata={},
        version=copy.head.version,
        position=copy.head.position,
        snapshot=with_number(Snapshot.decode(copy.snapshot), value).encode(),
        log_ids=copy.log_ids,
        marks=copy.marks,
    )
    await store.create(new)
    rebuilt, whole = await say(server, "s1"), await say(server, "s2")
    assert rebuilt["choices"] == whole["choices"]
    assert rebuilt["session"] == {**whole["session"], "id": "s1", "rebuilt": "corrupt"}
    assert rebuilt["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert "rebuilt" not in (await say(server, "s1"))["session"]
