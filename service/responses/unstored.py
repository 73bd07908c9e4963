"""A response of which nothing is kept: its turn runs on a copy of the chain's state, which vanishes with it."""

from __future__ import annotations

import asyncio
import dataclasses

from nsm_core.engine.request import GenerationRequest
from nsm_core.state.quantize import StateFormat
from service.generate.choices import RequestGroup
from service.generate.starting import ReturnedState, ids_of
from service.responses.chain import TurnPlan
from service.responses.opening import Opening
from service.state.resume import ResumedSession, resume, resume_after, resume_known


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Unstored:
    """An admitted response. `returned`: its end state, if it was asked for."""

    group: RequestGroup
    returned: ReturnedState | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """The engine's request, what its start had read, the format that this was rounded to, and the numerics classes that
    computed it, without the running one.
    """

    request: GenerationRequest
    before_ids: tuple[int, ...] = ()
    rounding: StateFormat = StateFormat.FP32
    earlier_numerics: tuple[str, ...] = ()


async def open_unstored(
    opening: Opening, plan: TurnPlan, *, response_id: str, is_stream: bool, return_state: bool
) -> Unstored:
    """Raises NotFound when the session is gone, and what `InferenceBackend.submit` raises."""
    services, tenant = opening.scope.services, opening.scope.tenant
    asked = await _ask(opening, plan, response_id, has_end=return_state)
    permit = services.tenants.enter(tenant)
    group = RequestGroup(
        services.backend, services.metrics, [asked.request], permit=permit, arrival=opening.arrival, is_stream=is_stream
    )
    if not return_state:
        return Unstored(group=group, returned=None)
    returned = ReturnedState(
        services=services,
        tenant=tenant,
        before_ids=asked.before_ids,
        num_prompt=len(asked.request.prompt_ids),
        seed=asked.request.sampling.seed,
        state=plan.state,
        rounding=asked.rounding,
        earlier_numerics=asked.earlier_numerics,
    )
    return Unstored(group=group, returned=returned)


async def _ask(opening: Opening, plan: TurnPlan, response_id: str, *, has_end: bool) -> _Asked:
    """`has_end`: whether the end state is wanted, and with it the log before."""
    fresh = GenerationRequest(
        request_id=response_id,
        prompt_ids=plan.input_ids,
        sampling=opening.sampling,
        deadline=opening.deadline,
        owner=opening.scope.tenant,
        keep_state=has_end,
    )
    if plan.state is not None:
        prompt_ids = (*plan.state.pending_ids, *plan.input_ids)
        request = dataclasses.replace(fresh, prompt_ids=prompt_ids, resume=plan.state.resume)
        return _Asked(request=request, before_ids=ids_of(plan.state))
    if plan.start is None:
        return _Asked(request=fresh)
    start, key = await _start(opening, plan), opening.scope.session_key(plan.start.session_id)
    if start is None:
        log_ids = await opening.scope.services.store.read_log(key, stop=(plan.stands_on or plan.start).num_log_tokens)
        return _Asked(request=dataclasses.replace(fresh, prompt_ids=(*log_ids, *plan.input_ids)))
    request = start.generation_request(opening.turn_request(response_id, plan, plan.start))
    request = dataclasses.replace(request, keep_state=has_end)
    if not has_end or request.resume is None:
        return _Asked(request=request)
    log_ids = await opening.scope.services.store.read_log(key, stop=request.resume.position)
    return _Asked(
        request=request,
        before_ids=log_ids,
        rounding=start.rounding,
        earlier_numerics=start.next_earlier_numerics,
    )


async def _start(opening: Opening, plan: TurnPlan) -> ResumedSession | None:
    """The state that the turn stands on; None when the session has none that can be used, and its log is to be read."""
    if plan.start is None:
        return None
    position = plan.start
    services, key = opening.scope.services, opening.scope.session_key(position.session_id)
    backend, hot = services.backend, await services.turns.keeper.find(key)
    if hot is not None:
        head = await services.store.get(key)
        is_newest = hot.known == (head.created_at, head.version) and head.version == position.version
        if is_newest and plan.after is not None and hot.border is not None:
            return resume_after(head, hot.border, model=backend.model, tokenizer=backend.tokenizer)
        if is_newest and plan.after is None:
            snapshot = await services.turns.keeper.bytes_of(hot.snapshot)  # which may go on in any engine
            if snapshot is not None:
                return resume_known(head, snapshot, model=backend.model, tokenizer=backend.tokenizer)
    if plan.after is not None:
        return None
    stored = await services.store.load(key)
    found = await asyncio.to_thread(resume, stored, model=backend.model, tokenizer=backend.tokenizer)
    is_there = isinstance(found, ResumedSession) and stored.head.version == position.version
    return found if is_there and isinstance(found, ResumedSession) else None
