"""The bodies under /v1/files and /v1/batches."""

from __future__ import annotations

from typing import Any, Literal, get_args

from pydantic import Field, field_validator

from nsm_core.errors import InvalidRequest
from service.schemas.common import RequestBody
from service.schemas.sessions import Metadata
from service.web.errors import shown

MIN_TTL_S, MAX_TTL_S = 3600, 2_592_000  # as OpenAI has them: an hour, 30 days
Endpoint = Literal["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"]


class ExpiresAfter(RequestBody):
    """When a file is deleted."""

    anchor: Literal["created_at"]
    seconds: int = Field(ge=MIN_TTL_S, le=MAX_TTL_S, description="after its creation")


class CreateBatchBody(RequestBody):
    """A file of requests, one a line, all for one endpoint."""

    input_file_id: str = Field(description="an uploaded file with the purpose `batch`")
    endpoint: Endpoint
    completion_window: Literal["24h"]
    metadata: Metadata = Field(default={})
    output_expires_after: ExpiresAfter | None = Field(default=None, description="of the output files; absent: never")

    @field_validator("endpoint", mode="before")
    @classmethod
    def _known(cls, value: Any) -> Any:
        return check_endpoint(value)


def check_endpoint(value: Any) -> str:
    """Raises InvalidRequest for one that batches cannot have."""
    known = get_args(Endpoint)
    if value not in known:
        message = f"endpoint must be one of {', '.join(known)}, got {shown(value)}"
        raise InvalidRequest(message, param="endpoint")
    return str(value)


def read_ttl(anchor: str | None, seconds: str | None) -> int | None:
    """The fields of a form; None without them. Raises InvalidRequest."""
    if anchor is None and seconds is None:
        return None
    if anchor != "created_at":
        message = f'expires_after[anchor] must be "created_at", got {shown(anchor)}'
        raise InvalidRequest(message, param="expires_after[anchor]")
    is_number = seconds is not None and seconds.isascii() and seconds.isdigit() and len(seconds) < 10
    if seconds is None or not is_number or not MIN_TTL_S <= int(seconds) <= MAX_TTL_S:
        message = f"expires_after[seconds] must be in [{MIN_TTL_S}, {MAX_TTL_S}], got {shown(seconds)}"
        raise InvalidRequest(message, param="expires_after[seconds]")
    return int(seconds)
