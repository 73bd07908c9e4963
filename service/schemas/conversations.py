"""The bodies under /v1/conversations."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import FailFast, Field, field_validator

from service.schemas.common import RequestBody
from service.schemas.items import Item
from service.schemas.responses import InputMessage, refuse_other_items
from service.schemas.sessions import Metadata

MAX_NEW_ITEMS = 20

NewItems = Annotated[list[InputMessage], FailFast(), Field(max_length=MAX_NEW_ITEMS)]


class ItemsBody(RequestBody):
    """Items to add at the end."""

    items: NewItems

    @field_validator("items", mode="before")
    @classmethod
    def _messages_only(cls, value: Any) -> Any:
        return refuse_other_items(value, "items")

    def to_items(self) -> list[Item]:
        """Each under a new id."""
        return [message.to_item() for message in self.items]


class CreateConversationBody(ItemsBody):
    """All of it is optional, the body as a whole too."""

    items: NewItems = Field(default=[])
    metadata: Metadata = Field(default={})


class UpdateConversationBody(RequestBody):
    """New metadata, as a whole."""

    metadata: Metadata
