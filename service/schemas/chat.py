"""The body of POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import FailFast, Field, WithJsonSchema, field_validator, model_validator

from nsm_core.chat_template import ChatMessage, ChatTemplate
from nsm_core.errors import InvalidRequest
from nsm_core.grammars.tool_calls import Tool, answer_text, results_message, with_tools
from nsm_core.sampling.params import MAX_TOP_LOGPROBS
from service.schemas.common import (
    IGNORED,
    MAX_MESSAGES,
    UNSUPPORTED,
    LengthFields,
    Limits,
    RequestBody,
    RequestSpec,
    RoutingFields,
    SamplingFields,
    check_n,
    content_schema,
)
from service.schemas.reasoning import ReasoningFields
from service.schemas.start_state import StateFields
from service.schemas.structured import StructuredFields
from service.schemas.tools import CHOICE_SCHEMA, TOOLS_SCHEMA, ToolUse, check_arguments, read_tools
from service.web.errors import shown

DEFAULT_MAX_TOKENS = 256
CONTENT_SCHEMA = content_schema({"const": "text"})
CALLS_SCHEMA = {"type": "array", "items": {"type": "object"}, "description": "of an assistant's message"}
MAX_NAME_CHARS = 64


class Call(NamedTuple):
    """A call that an assistant's message made."""

    id: str
    name: str
    arguments: str


class Message(RequestBody):
    """One message. Fields that an assistant's message carries when a client sends it back are accepted if empty, and
    its content may be absent: clients replay answers as they got them.
    """

    unsupported: ClassVar = {"refusal": (), "function_call": (), "audio": (), "annotations": ([],)}

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[Any, WithJsonSchema(CONTENT_SCHEMA)]
    name: str | None = Field(default=None, max_length=MAX_NAME_CHARS, description="of who speaks; read before the text")
    reasoning_content: str | None = Field(default=None, description="of an answer; it is not read again")
    tool_calls: Annotated[Any, WithJsonSchema(CALLS_SCHEMA)] = None
    tool_call_id: str | None = Field(default=None, description="of the call whose result a tool's message is")

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

    @field_validator("tool_calls", mode="after")
    @classmethod
    def _read_calls(cls, calls: Any) -> tuple[Call, ...]:
        if not isinstance(calls, list):
            raise ValueError("must be a list of calls")
        return tuple(map(_call_of, calls))

    @model_validator(mode="after")
    def _fields_of_its_role(self) -> Message:
        if self.tool_calls and self.role != "assistant":
            raise ValueError("must have no tool_calls: they are an assistant's")
        if (self.tool_call_id is not None) != (self.role == "tool"):
            raise ValueError("must have a tool_call_id if, and only if, it is a tool's")
        return self

    @property
    def text(self) -> str:
        """As the model reads it, with the speaker's name in front."""
        return self.content if self.name is None else f"{self.name}: {self.content}"


def core_messages(messages: Sequence[Message], template: ChatTemplate, tools: Sequence[Tool] = ()) -> list[ChatMessage]:
    """As the model reads them, tools in the template's form: a developer's message is a system message by its older
    name, calls are part of an answer's text, and results that follow each other are one message.

    Raises InvalidRequest for a result of no call.
    """
    read: list[ChatMessage] = []
    form = template.tool_form
    called: set[str] = set()
    results: list[str] = []
    for index, message in enumerate(messages):
        if message.role == "tool":
            if message.tool_call_id not in called:
                param = f"messages[{index}].tool_call_id"
                raise InvalidRequest(
                    f"{param} must be the id of a call made before, got {shown(message.tool_call_id)}", param=param
                )
            results.append(message.content)
            continue
        if results:
            read.append(results_message(results, form))
            results = []
        calls: tuple[Call, ...] = message.tool_calls or ()
        called.update(call.id for call in calls)
        role = "system" if message.role == "developer" else message.role
        text = answer_text(message.text, [(call.name, call.arguments) for call in calls], form)
        read.append(ChatMessage(role, text))
    return with_tools([*read, results_message(results, form)] if results else read, tools, form)


class ChatBody(SamplingFields, StructuredFields, LengthFields, RoutingFields, ReasoningFields, StateFields):
    """Messages in, the assistant's next message out."""

    ignored = {**IGNORED, "include": list}  # noqa: RUF012
    unsupported = {  # noqa: RUF012
        name: values for name, values in UNSUPPORTED.items() if name not in ("tools", "tool_choice")
    }

    model: str | None = None
    messages: Annotated[list[Message], FailFast()] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_tokens: int | None = Field(default=None, description=f"default {DEFAULT_MAX_TOKENS}")
    n: int = 1
    tools: Annotated[Any, WithJsonSchema(TOOLS_SCHEMA)] = None
    tool_choice: Annotated[Any, WithJsonSchema(CHOICE_SCHEMA)] = None
    parallel_tool_calls: bool = Field(default=True, description="whether an answer may hold several calls")
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
        return self

    @property
    def tool_use(self) -> ToolUse:
        """Raises InvalidRequest."""
        return read_tools(
            [] if self.tools is None else self.tools,
            self.tool_choice,
            has_many=self.parallel_tool_calls,
            nested=True,
        )

    def template_of_answer(self, template: ChatTemplate) -> ChatTemplate:
        """An answer in a form, or a call that must come, has no thought before it. Raises InvalidRequest."""
        has_form = self.to_grammar() is not None or self.tool_use.is_forced
        return template.without_thought() if has_form else self.template_by_effort(template)

    def to_request(self, limits: Limits, template: ChatTemplate) -> RequestSpec:
        """The prompt is the chat as the model reads it; `template`: that of the answer. Raises InvalidRequest."""
        use = self.tool_use
        check_n(self.n, 1, limits.max_choices)
        self.check_returned(self.n)
        form = self.to_grammar(prefix="" if use.tools else template.answer_prefix)
        grammar = use.to_grammar(form, template)
        # a form says itself where the answer ends; a text beside tools ends as any other
        has_stops = form is None and not use.is_forced
        sampling = self.to_sampling(
            limits,
            max_tokens=self.length(limits.max_tokens, default=DEFAULT_MAX_TOKENS),
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            template_stop=template.stop if has_stops else (),
            grammar=grammar,
        )
        self.check_routing(max_tokens=sampling.max_tokens, num_choices=self.n, param="max_completion_tokens")
        return RequestSpec(
            prompts=(render_chat(template, self.messages, use.tools),),
            n=self.n,
            sampling=sampling,
            timeout_s=self.timeout or limits.timeout_s,
            include_routing=self.include_routing,
            state=self.state,
            return_state=self.return_state,
        )


def render_chat(template: ChatTemplate, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> str:
    """The text that the assistant's next message continues."""
    return template.render(core_messages(messages, template, tools))


def _call_of(call: Any) -> Call:
    """Raises ValueError for anything but a call in the form of an answer's."""
    function = call.get("function") if isinstance(call, dict) else None
    is_call = isinstance(call, dict) and call.keys() <= {"id", "type", "function", "index"}
    if not is_call or call.get("type", "function") != "function" or not isinstance(function, dict):
        raise ValueError("must have calls of functions")
    for name, value in (("id", call.get("id")), ("function.name", function.get("name"))):
        if not isinstance(value, str) or not value:
            raise ValueError(f"must have calls whose {name} is a string")
    return Call(call["id"], function["name"], check_arguments(function.get("arguments")))


def _text_of(part: Any) -> str:
    if isinstance(part, dict) and set(part) == {"type", "text"} and part["type"] == "text":
        text = part["text"]
        if isinstance(text, str):
            return text
    raise ValueError('must have no parts but {"type": "text", "text": "..."}')
