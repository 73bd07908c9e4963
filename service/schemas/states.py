"""The body of POST /v1/states."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field, model_validator

from nsm_core.errors import InvalidRequest
from service.schemas.chat import Message
from service.schemas.common import MAX_MESSAGES, RequestBody
from service.schemas.sessions import MAX_COUNT, SESSION_ID, Metadata
from service.state.log_location import LogLocation
from service.web.errors import shown

SOURCES = ("text", "messages", "session", "file")


def check_state_name(name: str) -> str:
    """Raises InvalidRequest."""
    if not SESSION_ID.fullmatch(name):
        raise InvalidRequest(
            f"name must be 1 to 64 characters of A-Z, a-z, 0-9, _ and -, got {shown(name)}", param="name"
        )
    return name


class SessionPoint(RequestBody):
    """Where in a session: at its newest commit, or at one of the others."""

    id: str
    version: int | None = Field(default=None, le=MAX_COUNT, description="at the end of the turn that made it")
    position: int | None = Field(default=None, le=MAX_COUNT, description="after so many tokens of the log")

    @model_validator(mode="after")
    def _one_location(self) -> SessionPoint:
        if self.position is not None and self.version is not None:
            raise InvalidRequest("session.position and version exclude each other", param="session.position")
        return self

    @property
    def field(self) -> str:
        """The body's field that says where."""
        name = "version" if self.version is not None else "position" if self.position is not None else None
        return "session" if name is None else f"session.{name}"

    @property
    def location(self) -> LogLocation | None:
        """None: at the newest commit."""
        if self.position is None and self.version is None:
            return None
        return LogLocation(version=self.version, position=self.position, prefix="session.")


class CreateStateBody(RequestBody):
    """A name, and exactly one of the four sources."""

    name: Annotated[str, AfterValidator(check_state_name), Field(description="1 to 64 of A-Z a-z 0-9 _ and -")]
    text: str | None = Field(default=None, description="read as the beginning of a text")
    messages: list[Message] | None = Field(
        default=None, min_length=1, max_length=MAX_MESSAGES, description="read as the beginning of a chat"
    )
    session: SessionPoint | None = None
    file: str | None = Field(default=None, description="a state or an exported session, in base64")
    model: str | None = None
    metadata: Metadata = Field(default={})

    @model_validator(mode="after")
    def _one_source(self) -> CreateStateBody:
        given = [name for name in SOURCES if getattr(self, name) is not None]
        if len(given) != 1:
            message = f"exactly one of {', '.join(SOURCES)} is required, got {', '.join(given) or 'none'}"
            raise InvalidRequest(message, param=given[1] if given else "text")
        if self.text == "":
            raise InvalidRequest("text must have at least 1 character, got none", param="text")
        return self

    @property
    def source(self) -> str:
        """The one that is given."""
        return next(name for name in SOURCES if getattr(self, name) is not None)
