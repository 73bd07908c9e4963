"""The bodies under /v1/sessions."""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, Field, WithJsonSchema, model_validator

from nsm_core.chat_template import ChatTemplate
from nsm_core.errors import InvalidRequest
from nsm_core.sampling.params import MAX_TOP_LOGPROBS
from service.schemas.chat import Message
from service.schemas.common import (
    IGNORED,
    MAX_MESSAGES,
    MAX_TOKEN_IDS,
    UNSUPPORTED,
    LengthFields,
    Limits,
    RequestBody,
    RequestSpec,
    RoutingFields,
    SamplingFields,
    with_large_ids,
)
from service.schemas.completions import DEFAULT_MAX_TOKENS
from service.schemas.ignored_fields import (
    MAX_METADATA_KEY_CHARS,
    MAX_METADATA_PAIRS,
    MAX_METADATA_VALUE_CHARS,
    check_metadata,
)
from service.schemas.reasoning import ReasoningFields
from service.schemas.structured import StructuredFields
from service.state.log_location import LogLocation
from service.stores.sessions.base import UNSET, Unset
from service.web.errors import shown

MAX_COUNT = 2**63 - 1  # of versions and positions, as stores keep them
SESSION_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
GENERATED_PREFIX = "sess_"  # of ids that no user chose
INPUT_SCHEMA = {
    "description": "a text or token ids; may be empty when the session's last token waits to be read",
    "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "integer"}}],
}


MAX_TTL_S = 10 * 365 * 86_400.0


def new_session_id() -> str:
    return f"{GENERATED_PREFIX}{uuid.uuid4().hex}"


def check_session_id(session_id: str) -> str:
    """Raises InvalidRequest."""
    if not SESSION_ID.fullmatch(session_id):
        raise InvalidRequest(
            f"id must be 1 to 64 characters of A-Z, a-z, 0-9, _ and -, got {shown(session_id)}", param="id"
        )
    return session_id


SessionId = Annotated[
    str, AfterValidator(check_session_id), Field(description="1 to 64 of A-Z a-z 0-9 _ and -; made up when absent")
]
Metadata = Annotated[
    dict[str, str],
    AfterValidator(check_metadata),
    Field(
        description=f"at most {MAX_METADATA_PAIRS} pairs, keys of {MAX_METADATA_KEY_CHARS} and values of "
        f"{MAX_METADATA_VALUE_CHARS} characters"
    ),
]
Ttl = Annotated[
    float,
    Field(
        gt=0,
        le=MAX_TTL_S,
        allow_inf_nan=False,
        description="seconds from the last commit or change until the session is deleted; null: never",
    ),
]


def _check_input(value: Any) -> Any:
    """A text or token ids. Raises InvalidRequest."""
    if isinstance(value, list) and len(value) > MAX_TOKEN_IDS:
        raise InvalidRequest(f"input must have at most {MAX_TOKEN_IDS} token ids, got {len(value)}", param="input")
    if isinstance(value, str) or _is_ids(value):
        return value
    if _is_ids(exact := with_large_ids(value)):
        return exact
    raise InvalidRequest(f"input must be a string or a list of token ids, got {shown(value)}", param="input")


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int for item in value)  # true is no token id


Input = Annotated[Any, AfterValidator(_check_input), WithJsonSchema(INPUT_SCHEMA)]


class CreateSessionBody(RequestBody):
    """All of it is optional, the body as a whole too."""

    id: SessionId | None = None
    model: str | None = None
    metadata: Metadata = Field(default={})
    ttl_s: Ttl | None = None
    state: str | None = Field(
        default=None, description="start from it: name, name@version, or a returned state in base64"
    )


class UpdateSessionBody(RequestBody):
    """Absent fields stay as they are."""

    nullable = frozenset({"ttl_s"})

    metadata: Metadata | None = None
    ttl_s: Ttl | None = None

    @property
    def new_ttl_s(self) -> float | Unset | None:
        """UNSET when the body does not speak of it; None: for ever."""
        return self.ttl_s if "ttl_s" in self.model_fields_set else UNSET


class ForkBody(RequestBody):
    """All of it is optional, the body as a whole too; absent fields are those of the forked session."""

    nullable = frozenset({"ttl_s"})

    id: SessionId | None = None
    metadata: Metadata | None = None
    ttl_s: Ttl | None = None
    position: int | None = Field(
        default=None, le=MAX_COUNT, description="fork after so many tokens of the log; absent: at its end"
    )
    version: int | None = Field(
        default=None, le=MAX_COUNT, description="fork at the end of the turn that made this version"
    )

    @model_validator(mode="after")
    def _one_location(self) -> ForkBody:
        if self.position is not None and self.version is not None:
            raise InvalidRequest("position and version exclude each other", param="position")
        return self

    @property
    def location(self) -> LogLocation | None:
        """Where the fork begins; None: at the newest commit."""
        if self.position is None and self.version is None:
            return None
        return LogLocation(version=self.version, position=self.position)

    def ttl_s_over(self, inherited: float | None) -> float | None:
        return self.ttl_s if "ttl_s" in self.model_fields_set else inherited


class RewindBody(RequestBody):
    """Where to go back to: exactly one of the first two."""

    to_version: int | None = Field(
        default=None, le=MAX_COUNT, description="the end of the turn that made this version; 0: empty"
    )
    to_position: int | None = Field(default=None, le=MAX_COUNT, description="this many tokens of the log stay")
    expected_version: int | None = Field(
        default=None, ge=0, le=MAX_COUNT, description="409 when the session is at another version"
    )

    @model_validator(mode="after")
    def _one_target(self) -> RewindBody:
        if (self.to_version is None) == (self.to_position is None):
            raise InvalidRequest("exactly one of to_version and to_position is required", param="to_version")
        return self


class AppendBody(RequestBody):
    """What a session reads without an answer."""

    input: Input
    expected_version: int | None = Field(
        default=None, ge=0, le=MAX_COUNT, description="409 when the session is at another version"
    )


class ClearBody(RequestBody):
    """Where to return to."""

    mark: int = Field(ge=0, le=MAX_COUNT, description="`mark` of an append: the session's version before it")
    expected_version: int | None = Field(
        default=None, ge=0, le=MAX_COUNT, description="409 when the session is at another version"
    )


class GenerateBody(SamplingFields, StructuredFields, LengthFields, RoutingFields, ReasoningFields):
    """One turn: read `input`, or `messages` in the words of the chat template, then sample."""

    ignored = IGNORED
    non_semantic_fields = SamplingFields.non_semantic_fields | {"include_energy", "include_routing"}
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **UNSUPPORTED, "n": (1,), "best_of": (1,), "echo": (False,), "prompt": ()
    }  # fmt: skip

    model: str | None = None
    input: Input = ""
    messages: list[Message] | None = Field(
        default=None,
        min_length=1,
        max_length=MAX_MESSAGES,
        fail_fast=True,
        description="instead of `input`: those since the last turn, read in the words of the chat template",
    )
    max_tokens: int | None = Field(default=None, description=f"default {DEFAULT_MAX_TOKENS}")
    logprobs: int | None = Field(default=None, description=f"at most {MAX_TOP_LOGPROBS}")
    expected_version: int | None = Field(
        default=None,
        ge=0,
        le=MAX_COUNT,
        description="the version this turn continues; 409 when the session is at another",
    )

    @model_validator(mode="after")
    def _one_input(self) -> GenerateBody:
        if self.messages is not None and self.input:
            raise InvalidRequest("input and messages exclude each other", param="messages")
        return self

    @model_validator(mode="after")
    def _no_running_usage(self) -> GenerateBody:
        """A turn's stream is framed again from its record, which has the counts of its end."""
        if self.has_running_usage:
            raise InvalidRequest(
                "a session's stream has its usage at the end only", param="stream_options.continuous_usage_stats"
            )
        return self

    @property
    def digest_exclude(self) -> set[str]:
        """Fields that do not tell two requests apart; a body without messages has the digest that it always had."""
        absent = self.absent_reasoning if self.messages else {"messages", *self.absent_reasoning}
        return {*self.non_semantic_fields, *absent}

    def template_of_answer(self, template: ChatTemplate) -> ChatTemplate:
        """An answer in a form has no thought before it."""
        return self.template_by_effort(template) if self.to_grammar() is None else template.without_thought()

    def to_request(self, limits: Limits, template: ChatTemplate) -> RequestSpec:
        """The one prompt is the input. An answer to messages ends where the template says. Raises InvalidRequest."""
        max_tokens = self.length(limits.max_tokens, default=DEFAULT_MAX_TOKENS)
        grammar = self.to_grammar(prefix=template.answer_prefix if self.messages else "")
        sampling = self.to_sampling(
            limits,
            max_tokens=max_tokens,
            logprobs=self.logprobs,
            template_stop=template.stop if self.messages and grammar is None else (),
            grammar=grammar,
        )
        self.check_routing(max_tokens=max_tokens)
        return RequestSpec(
            prompts=(self.input,),
            sampling=sampling,
            timeout_s=self.timeout or limits.timeout_s,
            include_routing=self.include_routing,
        )
