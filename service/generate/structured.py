"""A request's grammar before it runs: compiled for its tenant, so that a refusal has a status."""

from __future__ import annotations

import dataclasses

from service.deps import Services
from service.schemas.common import RequestSpec


async def with_grammar(services: Services, tenant: str, spec: RequestSpec) -> RequestSpec:
    """The request with its grammar in the tenant's scope, which stands when this returns. Raises InvalidRequest."""
    grammar = spec.sampling.grammar
    if grammar is None:
        return spec
    grammar = dataclasses.replace(grammar, scope=tenant)
    await services.backend.check_grammar(grammar)
    return dataclasses.replace(spec, sampling=dataclasses.replace(spec.sampling, grammar=grammar))
