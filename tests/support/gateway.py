"""An application on a fake backend: in process for plain answers, on a real socket for streams and for leaving."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import json
import re
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
from fastapi import FastAPI
from openai import AsyncOpenAI

from service.app import create_app
from service.backends.base import InferenceBackend
from service.deps import Services
from service.served_models import OtherModel
from service.settings import Settings
from service.stores.prefixes.base import PrefixStore
from service.stores.prefixes.keys import MIN_TOKENS
from service.stores.sessions.base import SessionStore
from service.stores.sessions.sqlite import SqliteSessionStore
from service.telemetry.tracing.tracing import Tracing
from service.web.head_limits import RECEIVE_TIMEOUT_S
from tests.support.live_server import serving

FILE_HEADERS = {"content-type": "application/octet-stream"}  # of a session's file


@dataclasses.dataclass(frozen=True)
class Gateway:
    """`client` speaks HTTP. `store`: itself; that of `services` stands for it. `closing`: what ends with it."""

    app: FastAPI
    services: Services
    store: SessionStore
    client: httpx.AsyncClient
    url: str
    closing: contextlib.AsyncExitStack

    @functools.cached_property
    def openai(self) -> AsyncOpenAI:
        """The stock client, which never tries again by itself here."""
        made = AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)
        self.closing.push_async_callback(made.close)
        return made

    def metric(self, name: str, **labels: str) -> float:
        """The value of one sample; 0 when there is none yet."""
        value = self.services.metrics.registry.get_sample_value(name, labels)
        return 0.0 if value is None else value


@contextlib.asynccontextmanager
async def gateway(
    backend: InferenceBackend,
    *,
    is_live: bool = False,
    store: SessionStore | None = None,
    prefixes: PrefixStore | None = None,
    tracing: Tracing | None = None,
    prefix_min_tokens: int = MIN_TOKENS,
    receive_timeout_s: float = RECEIVE_TIMEOUT_S,
    others: Sequence[OtherModel] = (),
    data_dir: Path = Path("unused"),
    **settings: Any,
) -> AsyncIterator[Gateway]:
    """`is_live`: behind a real uvicorn. `store`, `prefixes`: None for one in memory. Settings that are not named are
    the defaults, but states of short prompts are kept, so that tests can be short.
    """
    wanted = Settings(data_dir=data_dir, **settings)
    store = store or SqliteSessionStore(None)
    app = create_app(
        wanted,
        backend,
        store,
        prefixes,
        tracing,
        prefix_min_tokens=prefix_min_tokens,
        receive_timeout_s=receive_timeout_s,
        others=others,
    )
    async with contextlib.AsyncExitStack() as stack:
        if is_live:
            url = await stack.enter_async_context(serving(app))
            client = httpx.AsyncClient(base_url=url, timeout=60, verify=False)  # certificates take 25 ms to read
        else:
            await stack.enter_async_context(app.router.lifespan_context(app))
            url = "http://localhost"
            client = httpx.AsyncClient(base_url=url, transport=httpx.ASGITransport(app))
        await stack.enter_async_context(client)
        yield Gateway(app, app.state.services, store, client, url, stack)


def error_of(response: httpx.Response) -> dict[str, Any]:
    """The standard error body, checked for its shape."""
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    return dict(body["error"])


def without_comments(stream: str) -> str:
    return re.sub(r"^:.*\n", "", stream, flags=re.MULTILINE)


def frames_of(text: str) -> list[dict[str, Any]]:
    """The JSON frames of a stream, which must end with [DONE]; comments and ids are left out."""
    parts = without_comments(text).split("\n\n")
    assert parts[-2:] == ["data: [DONE]", ""]
    return [json.loads(part.partition("data: ")[2]) for part in parts[:-2]]


async def until(condition: Callable[[], bool]) -> None:
    """Waits for what no event tells."""
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)
