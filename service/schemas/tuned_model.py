"""`"model": "ft:MODEL:NAME@VERSION"`: a model's name together with the tuned state that requests start from."""

from __future__ import annotations

from typing import Any

from nsm_core.errors import InvalidRequest

PREFIX = "ft:"


def tuned_model_name(model: str, reference: str) -> str:
    """The name that clients of fine-tuned models expect: it can be sent as `model`."""
    return f"{PREFIX}{model}:{reference}"


def with_named_state(fields: Any) -> Any:
    """A body whose `model` names a tuned state, with that in `state`; any other body as it is.

    Raises InvalidRequest where the body has a `state` too.
    """
    model = fields.get("model") if isinstance(fields, dict) else None
    if not isinstance(model, str) or not model.startswith(PREFIX):
        return fields
    base, reference = _parts(model)
    if fields.get("state") is not None:
        raise InvalidRequest("state and a model that names a state exclude each other", param="state")
    return {**fields, "model": base, "state": reference}


def base_model(model: str) -> str:
    """The model's own name, where that of a tuned state may stand beside it. Raises InvalidRequest."""
    return _parts(model)[0] if model.startswith(PREFIX) else model


def _parts(model: str) -> tuple[str, str]:
    base, colon, reference = model.removeprefix(PREFIX).rpartition(":")
    if not colon or not base or not reference:
        raise InvalidRequest("model must be ft:MODEL:NAME or ft:MODEL:NAME@VERSION", param="model")
    return base, reference
