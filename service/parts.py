"""The parts of one application, made once: those that all its models share, and the services of each model."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence

from nsm_core.state.quantize import StateFormat
from service.backends.base import HasDevices, HasUpstreams, InferenceBackend
from service.deps import Services
from service.files.stored_files import Files
from service.lifecycle.background import Background
from service.lifecycle.lifecycle import Lifecycle
from service.named_states.library import StateLibrary
from service.named_states.signature import StateSeal
from service.prompts import PromptEncoder
from service.served_models import OtherModel, ServedModels
from service.settings import Settings, naming
from service.state.keeper import SnapshotPolicy, StateKeeper
from service.state.replica import replica_name
from service.stores.instrumented import instrumented, instrumented_records, instrumented_states, traced_prefixes
from service.stores.prefixes.base import PrefixStore
from service.stores.prefixes.resume import PrefixResume
from service.stores.records.base import RecordStore
from service.stores.records.factory import records_beside
from service.stores.sessions.base import HasPool, SessionStore
from service.stores.sessions.quota import QuotaStore
from service.stores.states.base import StateStore
from service.stores.states.factory import states_beside
from service.telemetry.metrics.metrics import Metrics
from service.telemetry.tracing.generations import TracedBackend
from service.telemetry.tracing.tracing import Tracing
from service.tenants.api_keys import KeyFile
from service.tenants.tenants import Tenants
from service.turns.turns import TurnRegistry

MIB = 1024 * 1024


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SharedParts:
    """What follows from no model. The stores count, trace and hold quotas already."""

    store: SessionStore
    prefixes: PrefixStore
    records: RecordStore
    states: StateStore
    metrics: Metrics
    lifecycle: Lifecycle
    tenants: Tenants
    models: ServedModels[Services]
    files: Files
    background: Background
    seal: StateSeal
    batch_news: asyncio.Event
    tuning_news: asyncio.Event
    tracing: Tracing | None
    prefix_min_tokens: int

    def services_of(self, settings: Settings, backend: InferenceBackend) -> Services:
        """Those of one model, under its settings."""
        if self.tracing is not None:
            backend = TracedBackend(backend, self.tracing.tracer)
        prompts = PromptEncoder(backend, max_tokens=settings.max_prompt_tokens)
        return Services(
            settings=settings,
            backend=backend,
            store=self.store,
            metrics=self.metrics,
            lifecycle=self.lifecycle,
            prompts=prompts,
            prefix_resume=self._prefix_resume(settings, backend),
            turns=self._turns(settings, backend),
            tenants=self.tenants,
            records=self.records,
            states=self._states(settings, backend, prompts),
            models=self.models,
            files=self.files,
            background=self.background,
            batch_news=self.batch_news,
            tuning_news=self.tuning_news,
            tracing=self.tracing,
        )

    def _prefix_resume(self, settings: Settings, backend: InferenceBackend) -> PrefixResume:
        return PrefixResume(
            backend,
            self.prefixes if settings.prefix_cache_mb else None,
            self.metrics,
            state_format=StateFormat(settings.state_dtype),
            min_tokens=self.prefix_min_tokens,
        )

    def _turns(self, settings: Settings, backend: InferenceBackend) -> TurnRegistry:
        state_format = StateFormat(settings.state_dtype)
        keeper = StateKeeper(
            backend,
            self.store,
            self.metrics,
            policy=SnapshotPolicy(max_bytes=settings.state_cache_mb * MIB, limit=settings.snapshot_tokens),
            max_retained=settings.retained_snapshots,
            state_format=state_format,
        )
        return TurnRegistry(
            backend,
            self.store,
            metrics=self.metrics,
            lifecycle=self.lifecycle,
            lease_s=settings.lease_s,
            tenants=self.tenants,
            max_retained=settings.retained_snapshots,
            state_format=state_format,
            replica=replica_name(settings.port),
            keeper=keeper,
        )

    def _states(self, settings: Settings, backend: InferenceBackend, prompts: PromptEncoder) -> StateLibrary:
        return StateLibrary(
            backend,
            self.states,
            self.tenants,
            prompts,
            self.metrics.sessions,
            seal=self.seal,
            state_format=StateFormat(settings.state_dtype),
            name_of=self.models.name_of,
        )


def shared_parts(
    settings: Settings,
    backend: InferenceBackend,
    store: SessionStore,
    prefixes: PrefixStore,
    tracing: Tracing | None,
    *,
    others: Sequence[OtherModel],
    prefix_min_tokens: int,
) -> SharedParts:
    """`backend`: the first model's. Raises ConfigError when a file of keys cannot be used."""
    lifecycle = Lifecycle()
    metrics = _metrics(backend, store, lifecycle)
    tracer = None if tracing is None else tracing.tracer
    records = instrumented_records(records_beside(store), metrics.sessions, tracer)
    states = instrumented_states(states_beside(store), metrics.sessions, tracer)
    store = instrumented(store, metrics.sessions, tracer)
    with naming("api_keys_file"):
        keys = None if settings.api_keys_file is None else KeyFile(settings.api_keys_file)
    with naming("state_key_file"):
        seal = StateSeal.from_file(settings.state_key_file)
    tenants = Tenants(keys, store, metrics, records, states)
    return SharedParts(
        store=store if keys is None else QuotaStore(store, tenants),
        prefixes=prefixes if tracer is None else traced_prefixes(prefixes, tracer),
        records=records,
        states=states,
        metrics=metrics,
        lifecycle=lifecycle,
        tenants=tenants,
        models=ServedModels(
            others,
            metrics=metrics.models,
            max_bytes=None if settings.models_memory_mb is None else settings.models_memory_mb * MIB,
        ),
        files=Files(records, tenants),
        background=Background(),
        seal=seal,
        batch_news=asyncio.Event(),
        tuning_news=asyncio.Event(),
        tracing=tracing,
        prefix_min_tokens=prefix_min_tokens,
    )


def _metrics(backend: InferenceBackend, store: SessionStore, lifecycle: Lifecycle) -> Metrics:
    """With those of what the backend and the store have."""
    metrics = Metrics(backend, num_in_flight=lambda: lifecycle.num_active)
    if isinstance(store, HasPool):
        metrics.watch_redis_pool(store.num_connections_in_use)
    if isinstance(backend, HasDevices):
        metrics.watch_devices(backend.device_stats)
    if isinstance(backend, HasUpstreams):
        metrics.watch_upstreams(backend.upstream_stats)
    return metrics
