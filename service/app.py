"""The application: its routes, its middleware and its life. service/parts.py makes what they use."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

from nsm_core.distribution import version_of
from nsm_core.errors import NsmError
from service.backends.base import InferenceBackend
from service.batches.runner import BatchRunner
from service.deps import Services
from service.parts import shared_parts
from service.playground.page import add_playground
from service.routes import (
    batches,
    chat,
    completions,
    conversations,
    embeddings,
    files,
    fine_tuning,
    health,
    live_input,
    metrics,
    models,
    named_states,
    realtime,
    responses,
    sessions,
    states,
    streams,
    tokenize,
)
from service.served_models import OtherModel
from service.settings import Settings, items_of
from service.state.resting import shedding_snapshots
from service.stores.expiry import removing_expired
from service.stores.prefixes.base import PrefixStore
from service.stores.prefixes.factory import bounds_of
from service.stores.prefixes.memory import MemoryPrefixStore
from service.stores.sessions.base import SessionStore
from service.stores.usage_metrics import measuring_usage
from service.telemetry.metrics.shared import sharing
from service.telemetry.tracing.middleware import TraceRequests
from service.telemetry.tracing.tracing import Tracing
from service.tuning.runner import JobRunner, job_directory
from service.web.authentication import Authenticate
from service.web.direct_routes import RouteDirectly
from service.web.errors import handle, raise_not_found
from service.web.head_limits import RECEIVE_TIMEOUT_S
from service.web.load_shedding import ShedLoad
from service.web.middleware import AnswerHead, Body, CatchErrors, RequestContext, TrackRequests
from service.web.openapi import DescribedApi, add_docs_page
from service.web.origin import RequireHost, RequireOwnOrigin

MIB = 1024 * 1024
PREFIX_MIN_TOKENS = 128  # reading fewer tokens again costs less than storing most states: benchmarks/prefix_border.py
# of answers that pages of other origins may read beside the usual ones
EXPOSED_HEADERS = (
    "retry-after",
    "x-request-id",
    "x-should-retry",
    "x-ratelimit-limit-requests",
    "x-ratelimit-remaining-requests",
    "x-ratelimit-reset-requests",
)
ROUTES = (
    completions,
    chat,
    responses,
    conversations,
    live_input,  # before sessions: it takes the bodies of an append that are no JSON
    sessions,
    states,
    named_states,
    streams,
    realtime,
    files,
    batches,
    fine_tuning,
    embeddings,
    models,
    tokenize,
    health,
    metrics,
)


def create_app(
    settings: Settings,
    backend: InferenceBackend,
    store: SessionStore,
    prefixes: PrefixStore | None = None,
    tracing: Tracing | None = None,
    *,
    others: Sequence[OtherModel] = (),
    prefix_min_tokens: int = PREFIX_MIN_TOKENS,
    receive_timeout_s: float = RECEIVE_TIMEOUT_S,
) -> FastAPI:
    """An application that starts and stops its backend and stores. Its parts are at `app.state.services`.

    `prefixes`: None for a store in memory. `tracing`: None for no traces. `others`: models that are loaded on demand.
    `prefix_min_tokens`: see PrefixResume. `receive_timeout_s`: longest pause between two pieces of a body.

    Raises ConfigError when the file of API keys cannot be used.
    """
    prefixes = prefixes or MemoryPrefixStore(bounds_of(settings))
    parts = shared_parts(
        settings, backend, store, prefixes, tracing, others=others, prefix_min_tokens=prefix_min_tokens
    )
    services = parts.services_of(settings, backend)
    parts.models.open(
        services,
        lambda other, backend: parts.services_of(settings.for_other_model(other.name), backend),
        _serving_another,
    )
    app = _described_api(services, receive_timeout_s)
    app.state.services = services
    app.needs_key = services.tenants.has_keys
    for route in ROUTES:
        app.router.routes.extend(route.router.routes)  # as they are: including them would make each again
    app.router.default = raise_not_found
    add_docs_page(app)
    if settings.playground:
        add_playground(app)
    return app


def _described_api(services: Services, receive_timeout_s: float) -> DescribedApi:
    """Without routes."""
    return DescribedApi(
        title="nsm",
        description="Conversations are kept by the server: a turn sends only what is new. Errors have one shape, "
        "`ErrorBody`, and a `code` for programs.",
        summary="Recurrent language models whose conversations are small, durable states.",
        version=version_of(),
        servers=[{"url": "/"}],
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        lifespan=_lifespan,
        exception_handlers={NsmError: handle, RequestValidationError: handle, HTTPException: handle},
        middleware=_middleware(services, receive_timeout_s),
        # Metrics and spans are our own; see telemetry/tracing/middleware.py.
        telemetry={"tracing": False, "metrics": False, "logs": False, "auto_configure": False},
    )


def _middleware(services: Services, receive_timeout_s: float) -> list[Middleware]:
    """Outermost first."""
    settings, tracing = services.settings, services.tracing
    routes = [one for module in ROUTES for one in module.router.routes]
    return [
        Middleware(RequestContext, metrics=services.metrics, routes=routes),
        *([] if tracing is None else [Middleware(TraceRequests, tracer=tracing.tracer)]),
        Middleware(AnswerHead),
        *_origins(settings),
        Middleware(TrackRequests, lifecycle=services.lifecycle),
        Middleware(Authenticate, tenants=services.tenants),
        Middleware(ShedLoad, backend=None if services.models.has_others else services.backend),
        Middleware(
            Body,
            max_bytes=settings.max_body_bytes,
            max_file_bytes=settings.max_file_bytes,
            piece_s=receive_timeout_s,
            whole_s=settings.request_timeout_s,
        ),
        Middleware(RouteDirectly, routes=routes),
    ]


def _origins(settings: Settings) -> list[Middleware]:
    """Who may ask from where. With keys every Host is served: a page that was re-bound here has none of them.

    Errors are caught inside the layer that adds the headers of CORS: without them a page cannot read a refusal.
    """
    origins = items_of(settings.cors_origins)
    names = None if settings.api_keys_file is not None else {settings.host, *items_of(settings.allowed_hosts)}
    cors = Middleware(
        CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"], expose_headers=EXPOSED_HEADERS
    )
    return [
        *([cors] if origins else []),
        Middleware(CatchErrors),
        Middleware(RequireHost, names=names),
        Middleware(RequireOwnOrigin, origins=origins),
    ]


@contextlib.asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    services: Services = app.state.services
    async with contextlib.AsyncExitStack() as stack:
        if services.tracing is not None:
            stack.push_async_callback(asyncio.to_thread, services.tracing.shutdown)
        stack.push_async_callback(services.store.close)
        with services.settings.naming_store:
            await services.store.open()
        await stack.enter_async_context(removing_expired(services.store))
        keeper, cold_after_s = services.turns.keeper, services.settings.cold_after_s
        await stack.enter_async_context(shedding_snapshots(services.store, keeper, cold_after_s=cold_after_s))
        await stack.enter_async_context(removing_expired(services.records))
        await stack.enter_async_context(services.prefix_resume.running())
        stack.push_async_callback(services.backend.stop)
        await services.backend.start()
        await stack.enter_async_context(sharing(services.metrics.refresh))
        await stack.enter_async_context(
            measuring_usage(services.store, services.metrics.sessions, services.tenants.names)
        )
        stack.push_async_callback(services.background.drain)
        # turns commit before the engine and the store are gone; a graceful stop has drained them long before
        stack.push_async_callback(services.turns.drain, 0.0)
        await stack.enter_async_context(services.models.running())
        await stack.enter_async_context(BatchRunner(services).running())
        if services.settings.fine_tuning_jobs:
            directory = stack.enter_context(job_directory(services.settings))
            await stack.enter_async_context(JobRunner(services, directory).running())
        yield


@contextlib.asynccontextmanager
async def _serving_another(services: Services) -> AsyncIterator[None]:
    """A model beside the first, from its start to its end. Its turns commit before its engine stops."""
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(services.backend.stop)
        await services.backend.start()
        stack.push_async_callback(services.prefix_resume.drain)
        stack.push_async_callback(services.turns.drain, 0.0)
        yield
