"""A response of which nothing is kept: its turn runs on a copy of the chain's state, which vanishes with it."""

from __future__ import annotations

import asyncio
import dataclasses

from nsm_core.engine.request import GenerationRequest
from service.generate.choices import RequestGroup
from service.responses.chain import LogPosition, TurnPlan
from service.responses.opening import Opening
from service.state.resume import ResumedSession, resume, resume_known


async def open_unstored(opening: Opening, plan: TurnPlan, *, response_id: str, is_stream: bool) -> RequestGroup:
    """Raises NotFound when the session is gone, and what `InferenceBackend.submit` raises."""
    services = opening.scope.services
    request = await _request(opening, plan, response_id)
    permit = services.tenants.enter(opening.scope.tenant)
    return RequestGroup(
        services.backend, services.metrics, [request], permit=permit, arrival=opening.arrival, is_stream=is_stream
    )


async def _request(opening: Opening, plan: TurnPlan, response_id: str) -> GenerationRequest:
    fresh = GenerationRequest(
        request_id=response_id,
        prompt_ids=plan.input_ids,
        sampling=opening.sampling,
        deadline=opening.deadline,
        owner=opening.scope.tenant,
    )
    if plan.state is not None:
        prompt_ids = (*plan.state.pending_ids, *plan.input_ids)
        return dataclasses.replace(fresh, prompt_ids=prompt_ids, resume=plan.state.resume)
    if plan.start is None:
        return fresh
    start = await _start(opening, plan.start)
    if start is not None:
        request = start.generation_request(opening.turn_request(response_id, plan, plan.start))
        return dataclasses.replace(request, keep_state=False)
    log_ids = await opening.scope.services.store.read_log(
        opening.scope.session_key(plan.start.session_id), stop=plan.start.num_log_tokens
    )
    return dataclasses.replace(fresh, prompt_ids=(*log_ids, *plan.input_ids))


async def _start(opening: Opening, position: LogPosition) -> ResumedSession | None:
    """The state at `position`; None when the session has none that can be used, and its log is to be read."""
    services, key = opening.scope.services, opening.scope.session_key(position.session_id)
    backend, hot = services.backend, services.turns.keeper.find(key)
    if hot is not None:
        head = await services.store.get(key)
        if hot.known == (head.created_at, head.version) and head.version == position.version:
            return resume_known(head, hot.snapshot, model=backend.model, tokenizer=backend.tokenizer)
    stored = await services.store.load(key)
    found = await asyncio.to_thread(resume, stored, model=backend.model, tokenizer=backend.tokenizer)
    is_there = isinstance(found, ResumedSession) and stored.head.version == position.version
    return found if is_there and isinstance(found, ResumedSession) else None
