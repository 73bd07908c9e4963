"""The bodies of POST /tokenize and POST /detokenize, in vLLM's shapes."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, FailFast, Field, model_validator

from nsm_core.errors import InvalidRequest
from service.schemas.chat import Message
from service.schemas.common import MAX_MESSAGES, RequestBody
from service.schemas.tuned_model import base_model

# a tuned state reads the tokens of its model, so that it is not looked up
AnyModel = Annotated[str, AfterValidator(base_model)]


class TokenizeBody(RequestBody):
    """A prompt or a chat. With `add_special_tokens` the start token that a fresh text begins with is counted."""

    model: AnyModel | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], FailFast()] = Field(default=[], min_length=1, max_length=MAX_MESSAGES)
    add_special_tokens: bool = True
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _one_of_both(self) -> TokenizeBody:
        if (self.prompt is None) == (not self.messages):
            raise InvalidRequest("exactly one of prompt and messages is required", param="prompt")
        return self


class DetokenizeBody(RequestBody):
    """Token ids, special ones included: they stand for no text."""

    model: AnyModel | None = None
    tokens: Annotated[list[int], FailFast()]
