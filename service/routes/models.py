"""GET /v1/models and GET /v1/models/{model_id}."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.exceptions import HTTPException
from starlette.responses import Response

from service.deps import Services, ServicesDep, TenantDep
from service.schemas.answers import ModelAnswer, ModelPage
from service.web.json_body import JsonRoute, json_response
from service.web.openapi import ERROR_RESPONSES, answers

router = APIRouter(route_class=JsonRoute, tags=["models"], responses=ERROR_RESPONSES)


@router.get(
    "/v1/models",
    summary="List the models",
    response_class=Response,
    responses=answers(ModelPage),
)
async def list_models(services: ServicesDep, tenant: TenantDep) -> Response:
    """The models that this server serves, the first before those that are loaded on demand."""
    data = [model_object(services, name, tenant) for name in services.models.names]
    return json_response({"object": "list", "data": data})


@router.get(
    "/v1/models/{model_id:path}",
    summary="Get a model",
    response_class=Response,
    responses=answers(ModelAnswer),
)
async def get_model(model_id: str, services: ServicesDep, tenant: TenantDep) -> Response:
    """One model, which is not loaded for this; 404 when it is not served here."""
    if not model_id:  # a slash too many
        raise HTTPException(404)
    services.models.require_known(model_id)
    return json_response(model_object(services, model_id, tenant))


def model_object(services: Services, name: str, tenant: str) -> dict[str, Any]:
    """OpenAI's model object and, beyond it, the traits of this server: a state of constant size, no longest context,
    and features that are off for this tenant. What only a loaded model tells is null while it is not loaded.
    """
    models = services.models
    served, other = models.loaded_as(name), models.description_of(name)
    model = None if served is None else served.backend.model
    status, failure = models.status_of(name)
    return {
        "id": name,
        "object": "model",
        "created": 0 if model is None else model.created,
        "owned_by": "nsm",
        "root": name if model is None else model.name,
        "status": status,
        "error": failure,
        "max_model_len": None,
        "fingerprint": model.fingerprint if model is not None else None if other is None else other.fingerprint,
        "system_fingerprint": None if served is None else served.system_fingerprint,
        "numerics": None if model is None else model.numerics,
        "state_bytes": None if model is None else model.state_bytes,
        "state_dtype": services.state_format.value,
        "vocab_size": None if model is None else model.vocab_size,
        "num_parameters": None if model is None else model.num_parameters,
        "chat_template": None if served is None else served.chat_template.name,
        "prefix_cache": services.prefix_resume.is_on and services.tenants.may_cache_prefixes(tenant),
        "retained_snapshots": services.settings.retained_snapshots,
        "limits": {
            "max_prompt_tokens": services.settings.max_prompt_tokens,
            "max_tokens": services.settings.max_tokens_limit,
            "max_body_bytes": services.settings.max_body_bytes,
        },
    }
