"""A stateless request that starts from a named or returned state, and the object of a state that is returned."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
from typing import Any

from nsm_core.engine.request import EndState
from nsm_core.errors import InvalidRequest, NsmError
from nsm_core.state.quantize import StateFormat
from service.deps import Arrival, Services
from service.named_states.making import end_file
from service.named_states.start_state import StartState
from service.prompts import Prompt
from service.schemas.common import RequestSpec
from service.stores.prefixes.resume import Start
from service.transfer.session_file import encode_file


async def find_state(services: Services, tenant: str, spec: RequestSpec, arrival: Arrival) -> StartState | None:
    """The state that the request names. Raises what `StateLibrary.start` raises."""
    if spec.state is None:
        return None
    return await services.states.start(tenant, spec.state, deadline=arrival.time + spec.timeout_s)


async def read_after(
    services: Services, state: StartState | None, prompt: str | list[int], *, param: str = "prompt"
) -> Prompt:
    """The ids that a request reads after `state`; without one, those of a text of its own. Raises InvalidRequest."""
    if state is None:
        return await services.prompts.read(prompt, param=param)
    if isinstance(prompt, str):
        ids = await services.prompts.encode(prompt, param=param)
    else:
        services.prompts.check_ids(prompt, param=param)
        ids = prompt
    pending = state.pending_ids
    if not pending and not ids:
        raise InvalidRequest(f"{param} must not be empty: the state has no token that waits to be read", param=param)
    return Prompt(ids=(*pending, *ids), num_start=len(pending))


def start_after(state: StartState, prompt: Prompt) -> Start:
    """Where the prompt starts. No prefix is looked up or kept: those are of whole texts."""
    return Start(ids=prompt.ids, resume=state.resume, num_before=state.resume.position)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReturnedState:
    """The end state of a request with one choice.

    `before_ids`: what its start had read; `num_prompt`: the tokens of its own prompt; `state`: its start state, if that
    has a file; `rounding`, `earlier_numerics`: of a start that has none; `seed`: of its draws.
    """

    services: Services
    tenant: str
    before_ids: tuple[int, ...]
    num_prompt: int
    seed: int
    state: StartState | None = None
    rounding: StateFormat = StateFormat.FP32
    earlier_numerics: tuple[str, ...] = ()

    async def object(self, end: EndState | None) -> dict[str, Any]:
        """The state at the end, as JSON."""
        services = self.services
        if end is None:
            raise NsmError("the engine ended a request without its state")
        file = await end_file(
            services.backend,
            end,
            before_ids=self.before_ids,
            num_prompt=self.num_prompt,
            seed=self.seed,
            start=self.state,
            tenant=self.tenant,
            state_format=services.state_format,
            rounding=self.rounding,
            earlier_numerics=self.earlier_numerics,
        )
        raw = await asyncio.to_thread(lambda: services.states.seal.seal(encode_file(file)))
        return {
            "object": "state",
            "position": end.position,
            "num_tokens": len(file.log_ids),
            "model_fingerprint": services.backend.model.fingerprint,
            "num_bytes": len(raw),
            "data": (await asyncio.to_thread(base64.b64encode, raw)).decode(),
        }


def returned_state(
    services: Services, tenant: str, spec: RequestSpec, start: Start, state: StartState | None
) -> ReturnedState | None:
    """None for a request that asks for none."""
    if not spec.return_state:
        return None
    is_prefix = state is None and start.resume is not None
    return ReturnedState(
        services=services,
        tenant=tenant,
        before_ids=start.ids[: start.position] if state is None else ids_of(state),
        num_prompt=len(start.ids) - start.position,
        seed=spec.sampling.seed,
        state=state,
        rounding=services.state_format if is_prefix else StateFormat.FP32,
    )


def ids_of(state: StartState) -> tuple[int, ...]:
    """What the state has read; a pending token is part of the request's own prompt."""
    return state.file.log_ids[: state.resume.position]
