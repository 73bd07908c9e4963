"""A request's grammar before it runs: compiled for its tenant, so that a refusal has a status."""

from __future__ import annotations

import asyncio
import dataclasses

from nsm_core.errors import DeadlineExceeded
from service.deps import Arrival, Services
from service.schemas.common import RequestSpec


async def with_grammar(services: Services, tenant: str, spec: RequestSpec, arrival: Arrival) -> RequestSpec:
    """The request with its grammar in the tenant's scope, which stands when this returns.

    Raises InvalidRequest, Overloaded, or DeadlineExceeded for a grammar that does not stand at the request's deadline.
    """
    grammar = spec.sampling.grammar
    if grammar is None:
        return spec
    grammar = dataclasses.replace(grammar, scope=tenant)
    try:
        async with asyncio.timeout(arrival.left_s(spec.timeout_s)):
            await services.backend.check_grammar(grammar)
    except TimeoutError:
        raise DeadlineExceeded(f"the deadline passed before {grammar.param} was compiled") from None
    return dataclasses.replace(spec, sampling=dataclasses.replace(spec.sampling, grammar=grammar))
