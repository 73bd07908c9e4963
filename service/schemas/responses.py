"""The bodies under /v1/responses, and the items that conversations share with them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import FailFast, Field, WithJsonSchema, field_validator, model_validator
from pydantic_core import PydanticCustomError

from nsm_core.chat_template import ChatTemplate
from nsm_core.errors import InvalidRequest
from nsm_core.grammars.tool_calls import tools_text
from nsm_core.tool_form import ToolFormName
from service.schemas import ignored_fields
from service.schemas.chat import DEFAULT_MAX_TOKENS
from service.schemas.common import (
    MAX_MESSAGES,
    Limits,
    RequestBody,
    RequestSpec,
    SamplingFields,
    check_max_tokens,
    content_schema,
)
from service.schemas.items import Item, call_item, input_item, result_item
from service.schemas.reasoning import ReasoningFields
from service.schemas.sessions import Metadata
from service.schemas.structured import RESPONSE_FORMAT_SCHEMA, read_format
from service.schemas.tools import CHOICE_SCHEMA, TOOLS_SCHEMA, ToolUse, check_arguments, read_tools
from service.schemas.tuned_model import with_named_state
from service.web.errors import shown

TEXT_PARTS = ("input_text", "output_text", "text")
CONTENT_SCHEMA = content_schema({"enum": list(TEXT_PARTS)})
IGNORED: Mapping[str, type] = {**ignored_fields.COMMON, "max_tool_calls": int, "include": list}
UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "prompt": (),
    "top_logprobs": (0,),
    "logprobs": (False, 0),
    "n": (1,),
    "response_format": ({"type": "text"},),
    "context_management": ([],),
    "moderation": (),
    "modalities": (["text"],),
    "image": (),
}
OF_CHAT = {"messages": "input"}
LENGTHS_OF_CHAT = {"max_tokens": "max_output_tokens", "max_completion_tokens": "max_output_tokens"}
TEXT_SCHEMA = {
    "type": "object",
    "properties": {
        "format": {
            **RESPONSE_FORMAT_SCHEMA,
            "properties": {
                "type": {"enum": ["text", "json_object", "json_schema"]},
                "name": {"type": "string"},
                "schema": {"type": "object"},
            },
        }
    },
}
USUAL_VERBOSITY = (None, "medium")


def _require_one_of(supported: tuple[Any, ...], value: Any, param: str) -> None:
    if value not in supported:
        message = f"{param} must be {shown(supported[-1])}, got {shown(value)}"
        raise InvalidRequest(message, param=param, code="unsupported_parameter")


class InputMessage(RequestBody):
    """A message, a call that an answer made, or a call's result. What an output item carries when a client sends it
    back is accepted.
    """

    ignored: ClassVar = {"id": str, "status": str, "phase": str}

    type: Literal["message", "function_call", "function_call_output"] = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: Annotated[Any, WithJsonSchema(CONTENT_SCHEMA)] = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = Field(default=None, description="of a call: a JSON object as text")
    output: Annotated[Any, WithJsonSchema(CONTENT_SCHEMA)] = None

    @field_validator("content", "output", mode="after")
    @classmethod
    def _texts_only(cls, content: Any) -> tuple[str, ...]:
        if isinstance(content, str):
            return (content,)
        if isinstance(content, list) and content:
            return tuple(_text_of(part) for part in content)
        raise ValueError("must be a string or a list of text parts")

    @field_validator("arguments", mode="after")
    @classmethod
    def _arguments_are_an_object(cls, arguments: str) -> str:
        return check_arguments(arguments)

    @model_validator(mode="before")
    @classmethod
    def _fields_of_its_type(cls, item: Any) -> Any:
        kind = (item.get("type") or "message") if isinstance(item, dict) else None
        wanted = FIELDS_OF_TYPES.get(kind) if isinstance(kind, str) else None
        if wanted is None:
            return item
        for name in wanted:
            if item.get(name) is None:
                raise PydanticCustomError("missing_field", "{message}", {"name": name, "message": "is required"})
        for name in FIELDS_OF_ITEMS:
            if item.get(name) is not None and name not in wanted:
                message = f"{name} is no field of a {kind}"
                raise PydanticCustomError("unknown_parameter", "{message}", {"name": name, "message": message})
        return item

    def to_item(self) -> Item:
        if self.type == "message":
            return input_item(self.role or "user", self.content)
        if self.type == "function_call":
            return call_item(self.call_id or "", self.name or "", self.arguments or "{}")
        return result_item(self.call_id or "", "\n".join(self.output))


FIELDS_OF_TYPES: Mapping[str, tuple[str, ...]] = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
}
FIELDS_OF_ITEMS = ("role", "content", "call_id", "name", "arguments", "output")


def refuse_other_items(items: Any, param: str) -> Any:
    """Raises InvalidRequest for an item of another type, before its fields are looked at."""
    if not isinstance(items, list) or len(items) > MAX_MESSAGES:
        return items  # refused as a whole
    for number, item in enumerate(items):
        kind = item.get("type", "message") if isinstance(item, dict) else "message"
        if kind is not None and not (isinstance(kind, str) and kind in FIELDS_OF_TYPES):
            path = f"{param}[{number}].type"
            expected = ", ".join(f'"{name}"' for name in FIELDS_OF_TYPES)
            raise InvalidRequest(
                f"{path} must be one of {expected}, got {shown(kind)}", param=path, code="unsupported_parameter"
            )
    return items


DescribedMessages = Annotated[list[InputMessage], Field(max_length=MAX_MESSAGES)]


def tool_use_of(response: Mapping[str, Any]) -> ToolUse:
    """The tools of a response's object."""
    return read_tools(
        response["tools"], response["tool_choice"], has_many=response["parallel_tool_calls"], nested=False
    )


class ContextFields(ReasoningFields):
    """What a response stands on."""

    model: str | None = None
    input: Annotated[list[InputMessage], FailFast()] = Field(
        default=[],
        max_length=MAX_MESSAGES,
        description="a text, which is one user's message, or a list of messages",
    )
    instructions: str | None = Field(default=None, description="a system message for this response only")
    previous_response_id: str | None = None
    conversation: Annotated[Any, WithJsonSchema({"description": 'an id, or {"id": "conv_…"}'})] = None
    state: str | None = Field(
        default=None, description="begin a chain from it: name, name@version, or a returned state in base64"
    )
    truncation: Literal["auto", "disabled"] = "disabled"
    tools: Annotated[Any, WithJsonSchema(TOOLS_SCHEMA)] = None
    tool_choice: Annotated[Any, WithJsonSchema(CHOICE_SCHEMA)] = None
    parallel_tool_calls: bool = Field(default=True, description="whether an answer may hold several calls")

    @model_validator(mode="before")
    @classmethod
    def _tuned_model(cls, fields: Any) -> Any:
        return with_named_state(fields)

    @field_validator("input", mode="before", json_schema_input_type=str | DescribedMessages)
    @classmethod
    def _one_text_or_items(cls, value: Any) -> Any:
        if isinstance(value, str):
            return [{"role": "user", "content": value}]
        if not isinstance(value, list):
            raise ValueError("must be a string or a list of messages")
        return refuse_other_items([item for item in value if not _is_thought(item)], "input")

    @field_validator("conversation", mode="after")
    @classmethod
    def _conversation_id(cls, value: Any) -> str | None:
        name = value.get("id") if isinstance(value, dict) and set(value) == {"id"} else value
        if name is not None and not isinstance(name, str):
            raise ValueError('must be an id or {"id": "…"}')
        return name

    @model_validator(mode="after")
    def _one_context(self) -> ContextFields:
        if self.conversation is not None and self.previous_response_id is not None:
            raise InvalidRequest("conversation excludes previous_response_id", param="conversation")
        for name in ("previous_response_id", "conversation", "instructions"):
            if self.state is not None and getattr(self, name) is not None:
                raise InvalidRequest(f"state excludes {name}", param="state")
        if not self.input and self.conversation is None:
            raise InvalidRequest("input must hold at least 1 message, got none", param="input")
        if self.conversation is None and self.previous_response_id is None:
            self._check_results()
        return self

    def _check_results(self) -> None:
        """Raises InvalidRequest for a result of no call; the calls of a chain and a conversation are not looked up."""
        called: set[str | None] = set()
        for index, item in enumerate(self.input):
            if item.type == "function_call":
                called.add(item.call_id)
            elif item.type == "function_call_output" and item.call_id not in called:
                param = f"input[{index}].call_id"
                message = f"{param} must be the id of a call made before, got {shown(item.call_id)}"
                raise InvalidRequest(message, param=param)

    @property
    def tool_use(self) -> ToolUse:
        """Raises InvalidRequest."""
        return read_tools(
            [] if self.tools is None else self.tools,
            self.tool_choice,
            has_many=self.parallel_tool_calls,
            nested=False,
        )

    def template_of_answer(self, template: ChatTemplate) -> ChatTemplate:
        """A call that must come has no thought before it. Raises InvalidRequest."""
        return template.without_thought() if self.tool_use.is_forced else self.template_by_effort(template)

    def read_instructions(self, form: ToolFormName) -> str | None:
        """What is read in front of the chain: the instructions, and the tools."""
        tools = self.tool_use.tools
        if not tools:
            return self.instructions
        return "\n\n".join([*([self.instructions] if self.instructions else []), tools_text(tools, form)])

    def items(self) -> list[Item]:
        """The input, each item under a new id."""
        return [message.to_item() for message in self.input]


class CreateResponseBody(SamplingFields, ContextFields):
    """Items in, one assistant's message out."""

    ignored = IGNORED
    unsupported = UNSUPPORTED
    other_names = OF_CHAT | LENGTHS_OF_CHAT

    store: bool = True
    background: bool = False
    max_output_tokens: int | None = Field(default=None, description=f"default {DEFAULT_MAX_TOKENS}")
    return_state: bool = Field(
        default=False, description="the state at the end of a response that is not stored, as a file in base64"
    )
    metadata: Metadata = Field(default={})
    text: Annotated[Any, WithJsonSchema(TEXT_SCHEMA)] = None

    @field_validator("text", mode="after")
    @classmethod
    def _text_format(cls, value: Any) -> Any:
        if value is None:
            return None
        if not isinstance(value, dict) or not value.keys() <= {"format", "verbosity"}:
            raise InvalidRequest(f"text must be an object with format and verbosity, got {shown(value)}", param="text")
        if value.get("format") is not None:
            read_format(value["format"], "text.format", "", nested=False)
        _require_one_of(USUAL_VERBOSITY, value.get("verbosity"), "text.verbosity")
        return value

    @model_validator(mode="after")
    def _fields_fit(self) -> CreateResponseBody:
        for name in ("background", "conversation"):
            if getattr(self, name) and not self.store:
                raise InvalidRequest(f"{name} needs store: true", param=name)
        if self.return_state and self.store:
            message = "return_state needs store: false: a stored response goes on by previous_response_id"
            raise InvalidRequest(message, param="return_state")
        return self

    @property
    def text_format(self) -> dict[str, Any]:
        """As the response shows it."""
        return (self.text or {}).get("format") or {"type": "text"}

    def template_of_answer(self, template: ChatTemplate) -> ChatTemplate:
        """Nor has an answer in a form. Raises InvalidRequest."""
        has_form = self.text_format["type"] != "text"
        return template.without_thought() if has_form else super().template_of_answer(template)

    def to_request(self, limits: Limits, template: ChatTemplate) -> RequestSpec:
        """Raises InvalidRequest."""
        use = self.tool_use
        form = read_format(self.text_format, "text.format", "" if use.tools else template.answer_prefix, nested=False)
        grammar = use.to_grammar(form, template)
        # a form says itself where the answer ends; a text beside tools ends as any other
        has_stops = form is None and not use.is_forced
        max_tokens = min(DEFAULT_MAX_TOKENS, limits.max_tokens)
        if self.max_output_tokens is not None:
            max_tokens = check_max_tokens(self.max_output_tokens, limits.max_tokens, param="max_output_tokens")
        return RequestSpec(
            sampling=self.to_sampling(
                limits,
                max_tokens=max_tokens,
                template_stop=template.stop if has_stops else (),
                grammar=grammar,
            ),
            timeout_s=self.timeout or limits.timeout_s,
        )


class CountTokensBody(ContextFields):
    """As for a response; how it would be sampled does not matter."""

    ignored: ClassVar = {**IGNORED, "stream_options": dict}
    unsupported = UNSUPPORTED
    other_names = OF_CHAT


def _is_thought(item: Any) -> bool:
    """Of an earlier answer: clients send all of its items back, and this one is not read again."""
    return isinstance(item, dict) and item.get("type") == "reasoning"


def _text_of(part: Any) -> str:
    if isinstance(part, dict) and part.get("type") in TEXT_PARTS and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, dict) else part
    raise ValueError(f"must have text parts only ({', '.join(TEXT_PARTS)}), not {shown(kind)}")
