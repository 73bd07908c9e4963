"""The body of POST /v1/embeddings."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, WithJsonSchema

from nsm_core.errors import InvalidRequest
from service.schemas.common import MAX_TOKEN_IDS, RequestBody, with_large_ids
from service.schemas.tuned_model import base_model
from service.web.errors import shown

MAX_INPUTS = 256
MAX_DIMENSIONS = 4096
DEFAULT_DIMENSIONS = 1024
IDS = {"type": "array", "items": {"type": "integer"}}
INPUT_SCHEMA = {
    "description": f"a text or token ids, or a list of at most {MAX_INPUTS} of them",
    "anyOf": [
        {"type": "string"},
        IDS,
        {"type": "array", "items": {"type": "string"}},
        {"type": "array", "items": IDS},
    ],
}


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


def _is_input(value: Any) -> bool:
    """One text, or a list of token ids, texts or lists of them, whatever their number."""
    return isinstance(value, str) or _is_ids(value) or (isinstance(value, list) and all(map(_is_one, value)))


def _is_one(value: Any) -> bool:
    return (isinstance(value, str) and bool(value)) or _is_ids(value)


def _check_input(value: Any) -> Any:
    """Raises InvalidRequest for what is neither one input nor a list of them, and for empty ones."""
    if not _is_input(value) and _is_input(exact := with_large_ids(value)):
        value = exact
    inputs = value if isinstance(value, list) and not _is_ids(value) else [value]
    if not 0 < len(inputs) <= MAX_INPUTS:
        raise InvalidRequest(f"input must be 1 to {MAX_INPUTS} texts, got {len(inputs)}", param="input")
    for one in inputs:
        if not _is_one(one):
            message = f"input must be a text, token ids, or a list of these, none of them empty, got {shown(one)}"
            raise InvalidRequest(message, param="input")
        if len(one) > MAX_TOKEN_IDS and not isinstance(one, str):
            raise InvalidRequest(f"input must have at most {MAX_TOKEN_IDS} token ids, got {len(one)}", param="input")
    return inputs


def _check_model(value: str) -> str:
    """Raises InvalidRequest for a tuned state: vectors tell how far a text moved the model's own start."""
    if base_model(value) != value:
        raise InvalidRequest(
            f"model must be a model without a tuned state here: {base_model(value)!r}; embeddings have no other start",
            param="model",
        )
    return value


class EmbeddingsBody(RequestBody):
    """Texts whose states become vectors."""

    ignored: ClassVar = {"user": str}

    model: Annotated[str, AfterValidator(_check_model)] | None = None
    input: Annotated[Any, AfterValidator(_check_input), WithJsonSchema(INPUT_SCHEMA)]
    dimensions: int = Field(default=DEFAULT_DIMENSIONS, ge=1, le=MAX_DIMENSIONS)
    encoding_format: Literal["float", "base64"] = "float"
    timeout: float | None = Field(default=None, gt=0, description="seconds this request may take")
