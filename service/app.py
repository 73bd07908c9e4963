"""Wiring only: the parts of one application and its life."""

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
from nsm_core.state.quantize import StateFormat
from service.backends.base import HasDevices, HasUpstreams, InferenceBackend
from service.batches.runner import BatchRunner
from service.deps import Services
from service.files.stored_files import Files
from service.lifecycle.background import Background
from service.lifecycle.lifecycle import Lifecycle
from service.named_states.library import StateLibrary
from service.named_states.signature import StateSeal
from service.playground.page import add_playground
from service.prompts import PromptEncoder
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
from service.served_models import OtherModel, ServedModels
from service.settings import Settings, items_of, naming
from service.state.keeper import SnapshotPolicy, StateKeeper
from service.state.replica import replica_name
from service.state.resting import shedding_snapshots
from service.stores.expiry import removing_expired
from service.stores.instrumented import instrumented, instrumented_records, instrumented_states, traced_prefixes
from service.stores.prefixes.base import PrefixStore
from service.stores.prefixes.factory import bounds_of
from service.stores.prefixes.memory import MemoryPrefixStore
from service.stores.prefixes.resume import PrefixResume
from service.stores.records.factory import records_beside
from service.stores.sessions.base import HasPool, SessionStore
from service.stores.sessions.quota import QuotaStore
from service.stores.states.factory import states_beside
from service.stores.usage_metrics import measuring_usage
from service.telemetry.metrics.metrics import Metrics
from service.telemetry.metrics.shared import sharing
from service.telemetry.tracing.generations import TracedBackend
from service.telemetry.tracing.middleware import TraceRequests
from service.telemetry.tracing.tracing import Tracing
from service.tenants.api_keys import KeyFile
from service.tenants.tenants import Tenants
from service.tuning.runner import JobRunner, job_directory
from service.turns.turns import TurnRegistry
from service.web.authentication import Authenticate
from service.web.errors import handle
from service.web.head_limits import RECEIVE_TIMEOUT_S
from service.web.load_shedding import ShedLoad
from service.web.middleware import Body, CatchErrors, RequestContext, TrackRequests
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
    lifecycle = Lifecycle()
    collected = Metrics(backend, num_in_flight=lambda: lifecycle.num_active)
    if isinstance(store, HasPool):
        collected.watch_redis_pool(store.num_connections_in_use)
    if isinstance(backend, HasDevices):
        collected.watch_devices(backend.device_stats)
    if isinstance(backend, HasUpstreams):
        collected.watch_upstreams(backend.upstream_stats)
    records, base_store = records_beside(store), store
    prefixes = prefixes or MemoryPrefixStore(bounds_of(settings))
    with naming("api_keys_file"):
        keys = None if settings.api_keys_file is None else KeyFile(settings.api_keys_file)
    tracer = None if tracing is None else tracing.tracer
    store = instrumented(store, collected.sessions, tracer)
    records = instrumented_records(records, collected.sessions, tracer)
    if tracing is not None:
        prefixes = traced_prefixes(prefixes, tracing.tracer)
    state_store = instrumented_states(states_beside(base_store), collected.sessions, tracer)
    with naming("state_key_file"):
        seal = StateSeal.from_file(settings.state_key_file)
    tenants = Tenants(keys, store, collected, records, state_store)
    if keys is not None:
        store = QuotaStore(store, tenants)
    models: ServedModels[Services] = ServedModels(
        others,
        metrics=collected.models,
        max_bytes=None if settings.models_memory_mb is None else settings.models_memory_mb * MIB,
    )
    background, files = Background(), Files(records, tenants)
    news, tuning_news = asyncio.Event(), asyncio.Event()

    def services_of(settings: Settings, backend: InferenceBackend) -> Services:
        """Those of one model; what follows from no model is shared."""
        if tracing is not None:
            backend = TracedBackend(backend, tracing.tracer)
        prompts = PromptEncoder(backend, max_tokens=settings.max_prompt_tokens)
        state_format = StateFormat(settings.state_dtype)
        return Services(
            settings=settings,
            backend=backend,
            store=store,
            metrics=collected,
            lifecycle=lifecycle,
            prompts=prompts,
            prefix_resume=PrefixResume(
                backend,
                prefixes if settings.prefix_cache_mb else None,
                collected,
                state_format=state_format,
                min_tokens=prefix_min_tokens,
            ),
            turns=TurnRegistry(
                backend,
                store,
                metrics=collected,
                lifecycle=lifecycle,
                lease_s=settings.lease_s,
                tenants=tenants,
                max_retained=settings.retained_snapshots,
                state_format=state_format,
                replica=replica_name(settings.port),
                keeper=StateKeeper(
                    backend,
                    store,
                    collected,
                    policy=SnapshotPolicy(max_bytes=settings.state_cache_mb * MIB, limit=settings.snapshot_tokens),
                    max_retained=settings.retained_snapshots,
                    state_format=state_format,
                ),
            ),
            tenants=tenants,
            records=records,
            states=StateLibrary(
                backend,
                state_store,
                tenants,
                prompts,
                collected.sessions,
                seal=seal,
                state_format=state_format,
                name_of=models.name_of,
            ),
            models=models,
            files=files,
            background=background,
            batch_news=news,
            tuning_news=tuning_news,
            tracing=tracing,
        )

    services = services_of(settings, backend)
    models.open(
        services,
        lambda other, backend: services_of(settings.for_other_model(other.name), backend),
        _serving_another,
    )
    app = DescribedApi(
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
    app.state.services = services
    app.needs_key = tenants.has_keys
    for route in ROUTES:
        app.router.routes.extend(route.router.routes)  # as they are: including them would make each again
    add_docs_page(app)
    if settings.playground:
        add_playground(app)
    return app


def _middleware(services: Services, receive_timeout_s: float) -> list[Middleware]:
    """Outermost first."""
    settings, tracing = services.settings, services.tracing
    return [
        Middleware(
            RequestContext,
            metrics=services.metrics,
            routes=[one for module in ROUTES for one in module.router.routes],
        ),
        *([] if tracing is None else [Middleware(TraceRequests, tracer=tracing.tracer)]),
        Middleware(CatchErrors),
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
    ]


def _origins(settings: Settings) -> list[Middleware]:
    """Who may ask from where. With keys every Host is served: a page that was re-bound here has none of them."""
    origins = items_of(settings.cors_origins)
    names = None if settings.api_keys_file is not None else {settings.host, *items_of(settings.allowed_hosts)}
    cors = Middleware(
        CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"], expose_headers=EXPOSED_HEADERS
    )
    return [
        Middleware(RequireHost, names=names),
        *([cors] if origins else []),
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
