"""The dependencies of handlers."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import time
from collections.abc import Collection, Mapping
from typing import Annotated, Any

from fastapi import Depends
from starlette.requests import Request

from nsm_core.chat_template import ChatTemplate, get_template
from nsm_core.errors import NotFound, StateMismatch
from nsm_core.state.quantize import StateFormat
from service.backends.base import InferenceBackend
from service.files.stored_files import Files
from service.lifecycle.background import Background
from service.lifecycle.lifecycle import Lifecycle
from service.named_states.library import StateLibrary
from service.prompts import PromptEncoder
from service.schemas.common import MAX_CHOICES, Limits
from service.served_models import ServedModels
from service.settings import Settings
from service.stores.prefixes.resume import PrefixResume
from service.stores.records.base import Kind, Record, RecordStore
from service.stores.sessions.base import SessionStore
from service.stores.sessions.key import SessionKey
from service.telemetry.metrics.metrics import Metrics
from service.telemetry.request_context import ARRIVAL
from service.telemetry.tracing.tracing import Tracing
from service.tenants.tenants import Caller, Tenants
from service.turns.turns import TurnRegistry

prompt_logger = logging.getLogger("nsm.prompts")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """The parts of one application, wired once by `create_app`."""

    settings: Settings
    backend: InferenceBackend
    store: SessionStore
    metrics: Metrics
    lifecycle: Lifecycle
    prompts: PromptEncoder
    prefix_resume: PrefixResume
    turns: TurnRegistry
    tenants: Tenants
    records: RecordStore
    states: StateLibrary
    models: ServedModels[Services]
    files: Files
    background: Background
    batch_news: asyncio.Event  # a batch was created or cancelled here
    tuning_news: asyncio.Event  # the same of a fine-tuning job
    tracing: Tracing | None = None

    @property
    def model_name(self) -> str:
        """The name clients use."""
        return self.settings.served_model_name or self.backend.model.name

    @property
    def chat_template(self) -> ChatTemplate:
        """How chats become text: by the settings, or else by the model."""
        return get_template(self.settings.chat_template or self.backend.model.chat_template)

    @property
    def state_format(self) -> StateFormat:
        """The number format of new stored states."""
        return StateFormat(self.settings.state_dtype)

    @property
    def system_fingerprint(self) -> str:
        """Equal input gives equal text under an equal value: the model, shortened, its numerics class, and how states
        are rounded when they are stored, if they are.
        """
        model, state_format = self.backend.model, self.state_format
        rounding = "" if state_format is StateFormat.FP32 else f"_{state_format}"
        return f"fp_{model.fingerprint[:12]}_{model.numerics}{rounding}"

    @property
    def limits(self) -> Limits:
        """For one generation body. More choices than the engines can hold would be refused each time."""
        return Limits(
            max_tokens=self.settings.max_tokens_limit,
            max_choices=min(MAX_CHOICES, self.backend.max_requests),
            vocab_size=self.backend.tokenizer.vocab_size,
            timeout_s=self.settings.request_timeout_s,
        )

    def log_prompt(self, arrival: Arrival, prompt: object) -> None:
        """Writes a client's prompt to the log if `log_prompts` is set."""
        if self.settings.log_prompts:
            line, fields = "request_id=%s prompt=%s", {"prompt": prompt}
            prompt_logger.info(line, arrival.request_id, json.dumps(prompt), extra={"fields": fields})

    @property
    def num_running(self) -> int:
        """Turns of the model's sessions that run in this process."""
        return self.turns.num_running

    async def for_model(self, name: str | None) -> Services:
        """Those of a model, which is loaded if need be; None: of the first. Raises NotFound or ModelUnavailable."""
        return await self.models.get(name)

    async def for_start(self, tenant: str, model: str | None, state: str | None) -> Services:
        """Those of the model that a request names; without one, of the model of the state that it starts from, if that
        is served here. Raises as `for_model` and `StateLibrary.fingerprint_of`.
        """
        if model is not None or state is None or not self.models.has_others:
            return await self.for_model(model)
        return await self.models.of_fingerprint(await self.states.fingerprint_of(tenant, state))

    async def for_session(self, key: SessionKey, model: str | None = None) -> Services:
        """Those of the model that made the session, which stays with it; of the first if that is not served here.

        Raises NotFound, ModelUnavailable, or StateMismatch if the request names another model.
        """
        if not self.models.has_others:
            return await self.for_model(model)
        if model is not None:
            self.models.require_known(model)
        fingerprint = (await self.store.get(key)).model_fingerprint
        own = self.models.name_of(fingerprint) or self.models.first.model_name
        if model is not None and model != own:
            raise StateMismatch(
                f"session {key.session_id!r} is of the model {own!r} and stays with it; the request names {model!r}",
                param="model",
            )
        return await self.for_model(own)

    def turns_of(self, key: SessionKey) -> TurnRegistry:
        """The registry in which a turn of the session runs; where none runs, this one."""
        registries = (served.turns for served in self.models.loaded)
        return next((turns for turns in registries if turns.is_running(key)), self.turns)


@dataclasses.dataclass(frozen=True, slots=True)
class TenantScope:
    """The services on behalf of one tenant: its sessions and its documents, by their ids alone."""

    services: Services
    tenant: str

    async def for_model(self, name: str | None) -> TenantScope:
        """As `Services.for_model`."""
        return TenantScope(await self.services.for_model(name), self.tenant)

    async def for_start(self, model: str | None, state: str | None) -> TenantScope:
        """As `Services.for_start`."""
        return TenantScope(await self.services.for_start(self.tenant, model, state), self.tenant)

    async def for_session(self, session_id: str) -> TenantScope:
        """As `Services.for_session`; this one for a session that is gone."""
        if not self.services.models.has_others:
            return self
        try:
            return TenantScope(await self.services.for_session(self.session_key(session_id)), self.tenant)
        except NotFound:
            return self

    def session_key(self, session_id: str) -> SessionKey:
        return SessionKey(self.tenant, session_id)

    async def get_record(self, kind: Kind, record_id: str) -> Record | None:
        return await self.services.records.get(tenant=self.tenant, kind=kind, record_id=record_id)

    async def put_record(
        self,
        kind: Kind,
        record_id: str,
        document: Mapping[str, Any],
        *,
        expected_version: int,
        holds: Collection[str] = (),
    ) -> int:
        """The new version. `holds`: sessions that the document needs from now on. Raises VersionConflict."""
        return await self.services.records.put(
            tenant=self.tenant,
            kind=kind,
            record_id=record_id,
            document=document,
            expected_version=expected_version,
            holds=holds,
        )

    async def delete_record(self, kind: Kind, record_id: str) -> bool:
        """Whether there was one."""
        return await self.services.records.delete(tenant=self.tenant, kind=kind, record_id=record_id)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """Id and time of arrival (`time.monotonic()`) of one HTTP request."""

    request_id: str
    time: float

    def left_s(self, timeout_s: float) -> float:
        """The remaining time of a request, in seconds; negative after its deadline."""
        return self.time + timeout_s - time.monotonic()


async def get_services(request: Request) -> Services:
    services: Services = request.app.state.services
    return services


async def get_arrival(request: Request) -> Arrival:
    state = request.scope.get("state", {})
    return Arrival(request_id=state.get("request_id", "none"), time=state.get(ARRIVAL, time.monotonic()))


async def get_tenant(request: Request) -> str:
    """The tenant whose sessions a request may see: the API key alone decides, never a field of the body."""
    caller: Caller = request.scope["state"]["caller"]  # put there by `Authenticate`
    return caller.tenant


ServicesDep = Annotated[Services, Depends(get_services)]
ArrivalDep = Annotated[Arrival, Depends(get_arrival)]
TenantDep = Annotated[str, Depends(get_tenant)]


async def get_scope(services: ServicesDep, tenant: TenantDep) -> TenantScope:
    return TenantScope(services, tenant)


ScopeDep = Annotated[TenantScope, Depends(get_scope)]
