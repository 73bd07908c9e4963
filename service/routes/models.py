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
    summary="List the model",
    response_class=Response,
    responses=answers(ModelPage),
)
async def list_models(services: ServicesDep, tenant: TenantDep) -> Response:
    """The one model this server serves."""
    return json_response({"object": "list", "data": [model_object(services, tenant)]})


@router.get(
    "/v1/models/{model_id:path}",
    summary="Get the model",
    response_class=Response,
    responses=answers(ModelAnswer),
)
async def get_model(model_id: str, services: ServicesDep, tenant: TenantDep) -> Response:
    """One model; 404 when it is not served here."""
    if not model_id:  # a slash too many
        raise HTTPException(404)
    services.check_model(model_id)
    return json_response(model_object(services, tenant))


def model_object(services: Services, tenant: str) -> dict[str, Any]:
    """OpenAI's model object and, beyond it, the traits of this server: a state of constant size, no longest context,
    and features that are off for this tenant.
    """
    model = services.backend.model
    return {
        "id": services.model_name,
        "object": "model",
        "created": model.created,
        "owned_by": "nsm",
        "root": model.name,
        "max_model_len": None,
        "fingerprint": model.fingerprint,
        "system_fingerprint": services.system_fingerprint,
        "numerics": model.numerics,
        "state_bytes": model.state_bytes,
        "state_dtype": services.state_format.value,
        "vocab_size": model.vocab_size,
        "num_parameters": model.num_parameters,
        "chat_template": services.chat_template.name,
        "prefix_cache": services.prefix_resume.is_on and services.tenants.may_cache_prefixes(tenant),
        "retained_snapshots": services.settings.retained_snapshots,
        "limits": {
            "max_prompt_tokens": services.settings.max_prompt_tokens,
            "max_tokens": services.settings.max_tokens_limit,
            "max_body_bytes": services.settings.max_body_bytes,
        },
    }
