"""The body of POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import FailFast, Field, WithJsonSchema, field_validator, model_validator

from nsm_core.chat_template import ChatMessage, ChatTemplate
from nsm_core.errors import InvalidRequest
from nsm_core.sampling.params import MAX_TOP_LOGPROBS
from service.schemas.common import (
    IGNORED,
    MAX_MESSAGES,
    UNSUPPORTED,
    Limits,
    RequestBody,
    RequestSpec,
    RoutingFields,
    SamplingFields,
    check_max_tokens,
    check_n,
    content_schema,
)
from service.schemas.structured import StructuredFields

DEFAULT_MAX_TOKENS = 256
CONTENT_SCHEMA = content_schema({"const": "text"})


class Message(RequestBody):
    """One message. Fields that an assistant's message carries when a client sends it back are accepted if empty, and
    its content may be absent: clients replay answers as they got them.
    """

    ignored: ClassVar = {"name": str}
    unsupported: ClassVar = {
        "tool_call_id": (),
        "refusal": (),
        "tool_calls": ([],),
        "function_call": (),
        "audio": (),
        "annotations": ([],),
    }

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[Any, WithJsonSchema(CONTENT_SCHEMA)]

    @model_validator(mode="before")
    @classmethod
    def _answer_without_text(cls, message: Any) -> Any:
        if isinstance(message, dict) and message.get("role") == "assistant" and message.get("content") is None:
            return {**message, "content": ""}
        return message

    @field_validator("content", mode="after")
    @classmethod
    def _text_only(cls, content: Any) -> str:
        if isinstance(content, str):
            return content
        if isinstance(content, list) and content:
            return "\n".join(_text_of(part) for part in content)
        raise ValueError("must be a string or a list of text parts")

    def to_core(self) -> ChatMessage:
        """A developer's message is a system message by its older name."""
        return ChatMessage(role="system" if self.role == "developer" else self.role, content=self.content)


class ChatBody(SamplingFields, StructuredFields, RoutingFields):
    """Messages in, the assistant's next message out."""

    ignored = IGNORED
    unsupported = UNSUPPORTED

    model: str | None = None
    messages: Annotated[list[Message], FailFast()] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_completion_tokens: int | None = Field(default=None, description=f"default {DEFAULT_MAX_TOKENS}")
    max_tokens: int | None = Field(default=None, description="older name of max_completion_tokens")
    n: int = 1
    logprobs: bool = False
    top_logprobs: int | None = Field(default=None, description=f"at most {MAX_TOP_LOGPROBS}; needs logprobs: true")
    cache_prompt: bool = Field(
        default=True, description="start from a stored state of the prompt's beginning, and keep such states"
    )

    @model_validator(mode="after")
    def _fields_fit(self) -> ChatBody:
        if self.top_logprobs is not None:
            if not self.logprobs:
                raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")
            if not 0 <= self.top_logprobs <= MAX_TOP_LOGPROBS:
                message = f"top_logprobs must be in [0, {MAX_TOP_LOGPROBS}], got {self.top_logprobs}"
                raise InvalidRequest(message, param="top_logprobs")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            message = f"max_tokens and max_completion_tokens differ: {self.max_tokens}, {self.max_completion_tokens}"
            raise InvalidRequest(message, param="max_tokens")
        return self

    def to_request(self, limits: Limits, template: ChatTemplate) -> RequestSpec:
        """The prompt is the chat as the model reads it. Raises InvalidRequest."""
        check_n(self.n, 1, limits.max_choices)
        grammar = self.to_grammar(prefix=template.answer_prefix)
        sampling = self.to_sampling(
            limits,
            max_tokens=self._max_tokens(limits.max_tokens),
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            template_stop=() if grammar else template.stop,  # a grammar says itself where the answer ends
            grammar=grammar,
        )
        self.check_routing(max_tokens=sampling.max_tokens, num_choices=self.n, param="max_completion_tokens")
        return RequestSpec(
            prompts=(render_chat(template, self.messages),),
            n=self.n,
            sampling=sampling,
            timeout_s=self.timeout or limits.timeout_s,
            include_routing=self.include_routing,
        )

    def _max_tokens(self, limit: int) -> int:
        for name in ("max_completion_tokens", "max_tokens"):
            given: int | None = getattr(self, name)
            if given is not None:
                return check_max_tokens(given, limit, param=name)
        return min(DEFAULT_MAX_TOKENS, limit)


def render_chat(template: ChatTemplate, messages: Sequence[Message]) -> str:
    """The text that the assistant's next message continues."""
    return template.render([message.to_core() for message in messages])


def _text_of(part: Any) -> str:
    if isinstance(part, dict) and set(part) == {"type", "text"} and part["type"] == "text":
        text = part["text"]
        if isinstance(text, str):
            return text
    raise ValueError('must have no parts but {"type": "text", "text": "..."}')
