"""What every generation body shares: strict types, refusal of what the server cannot do, the sampling fields."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, FailFast, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from nsm_core.errors import InvalidRequest
from nsm_core.grammars.grammar import Grammar
from nsm_core.inspection.routing import MAX_ROUTED_REQUESTS, MAX_ROUTED_TOKENS
from nsm_core.random_ids import random_bits
from nsm_core.sampling.params import (
    MAX_LOGIT_BIASES,
    MAX_STOP_TOKEN_IDS,
    MAX_TOP_K,
    SEED_BITS,
    SamplingParams,
    seed_bits,
    top_k_count,
)
from service.messages import HINT_CUTOFF
from service.schemas import ignored_fields
from service.web.errors import shown

MAX_TIMEOUT_S = 86_400.0
MAX_CHOICES = 128
MAX_OWN_STOPS = 16  # stop strings of one body; a chat template's come on top
MAX_MESSAGES = 4096  # of one body; each costs some 20 µs on the event loop, which every stream shares
MAX_TOKEN_IDS = 2**20  # of one list, whatever a prompt may have

IGNORED: Mapping[str, type] = {**ignored_fields.COMMON, "metadata": dict}
# Fields that this server does not support, with the values that ask for nothing.
UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "suffix": ("",),
    "store": (False,),
    "prediction": (),
    "web_search_options": (),
    "moderation": (),
    "verbosity": (),
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The server's limits for one generation body. `timeout_s`: of a body that sets none."""

    max_tokens: int
    max_choices: int
    vocab_size: int
    timeout_s: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RequestSpec:
    """A generation body within its limits, independent of its endpoint. `to_request` of each body makes it.

    `prompts`: texts or token ids; none for a response, whose prompt depends on its chain. `n`: choices for each prompt.
    `sampling`: of choice 0. `prompt_logprobs`: as in GenerationRequest. `is_score_only`: nothing is sampled. `state`,
    `return_state`: as in StateFields.
    """

    prompts: tuple[str | list[int], ...] = ()
    n: int = 1
    sampling: SamplingParams
    timeout_s: float
    prompt_logprobs: int | None = None
    is_score_only: bool = False
    include_routing: bool = False
    state: str | None = None
    return_state: bool = False

    @property
    def max_tokens(self) -> int:
        """The limit for new tokens of a choice."""
        return 0 if self.is_score_only else self.sampling.max_tokens

    def sampling_of(self, choice_index: int) -> SamplingParams:
        """Of one choice."""
        return dataclasses.replace(self.sampling, choice_index=choice_index) if choice_index else self.sampling


class RequestBody(BaseModel):
    """A JSON object read strictly: neither "5" nor true is a number, unknown fields are errors, null is absence.

    `ignored`: fields of other servers that are checked and dropped, unless the body has them as its own. `nullable`:
    fields where null is not absence.
    `unsupported`: fields that are refused, except with the values listed. `other_names`: names of this body's fields in
    other bodies, for hints.
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)
    ignored: ClassVar[Mapping[str, type]] = ignored_fields.NONE
    nullable: ClassVar[frozenset[str]] = frozenset()
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    other_names: ClassVar[Mapping[str, str]] = {}

    @model_validator(mode="before")
    @classmethod
    def _refuse_what_would_be_ignored(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        fields_left = {}
        for name, value in body.items():
            if value is None and name not in cls.nullable:
                continue
            if name in cls.ignored and name not in cls.__pydantic_fields__:
                ignored_fields.check_ignored(name, value, cls.ignored[name])
            elif name in cls.unsupported:
                if not any(is_same(value, empty) for empty in cls.unsupported[name]):
                    message = f"is not supported by this server, got {shown(value)}"
                    raise PydanticCustomError("unsupported_parameter", "{message}", {"name": name, "message": message})
            elif name not in cls.__pydantic_fields__:
                message = cls._unknown(name)
                raise PydanticCustomError("unknown_parameter", "{message}", {"name": name, "message": message})
            else:
                fields_left[name] = value
        return fields_left

    @classmethod
    def _unknown(cls, name: str) -> str:
        other = cls.other_names.get(name)
        close = (
            difflib.get_close_matches(name[:64], cls.model_fields, n=1, cutoff=HINT_CUTOFF)
            if other is None
            else [other]
        )
        return f"unknown field {shown(name)}" + (f"; did you mean {close[0]}?" if close else "")


def is_same(value: Any, other: Any) -> bool:
    """Equality in JSON, where 0 is not false."""
    if type(value) is not type(other):
        return False
    if isinstance(other, dict):
        return value.keys() == other.keys() and all(is_same(value[name], part) for name, part in other.items())
    if isinstance(other, list):
        return len(value) == len(other) and all(map(is_same, value, other))
    return bool(value == other)


def _empty(kind: type[dict[str, Any] | list[Any]], **options: Any) -> Any:
    """A field that is empty by default. Of a default that is given as a value each body would get a deep copy."""
    return Field(default_factory=kind, json_schema_extra={"default": kind()}, **options)


class StreamOptions(RequestBody):
    """How a stream is framed. `include_obfuscation` is accepted and answered with none.

    `event_per_token`: an event never carries the text of several tokens, however busy the server is.
    `continuous_usage_stats`: with `include_usage`, every chunk of a completion or chat has the counts so far.
    """

    include_usage: bool = False
    include_obfuscation: bool = False
    continuous_usage_stats: bool = False
    event_per_token: bool = False


class SamplingFields(RequestBody):
    """The fields of every generation body. SamplingParams checks the ranges.

    `non_semantic_fields`: they do not change the result, so a retry may differ in them.
    """

    non_semantic_fields: ClassVar[frozenset[str]] = frozenset({"stream", "stream_options", "timeout"})

    temperature: float = Field(default=1.0, description="0 is greedy; at most 2")
    top_p: float = Field(default=1.0, description="in (0, 1]")
    top_k: int = Field(default=0, description=f"0 means all tokens, and so does -1; at most {MAX_TOP_K}")
    min_p: float = Field(default=0.0, description="in [0, 1]")
    repetition_penalty: float = Field(default=1.0, description="in (0, 10]; 1 means none")
    presence_penalty: float = Field(default=0.0, description="in [-2, 2]")
    frequency_penalty: float = Field(default=0.0, description="in [-2, 2]")
    logit_bias: dict[str, float] = _empty(dict, description="token id -> bias in [-100, 100]")
    seed: int | None = Field(
        default=None, description="64 bits, signed or unsigned: in [-2^63, 2^64), -1 being 2^64 - 1; drawn when absent"
    )
    stop: list[str] = _empty(list, description=f"a string or up to {MAX_OWN_STOPS} of them")
    min_tokens: int = Field(default=0, description="end of text and stop ids come after so many tokens at the earliest")
    stop_token_ids: Annotated[list[int], FailFast()] = _empty(list, max_length=MAX_STOP_TOKEN_IDS)
    ignore_eos: bool = Field(default=False, description="go on after end of text")
    include_energy: bool = Field(default=False, description="joules in usage")
    timeout: float | None = Field(
        default=None, description="seconds this request may take, its time in the queue included"
    )
    stream: bool = False
    stream_options: StreamOptions | None = None

    @field_validator("stop", mode="before", json_schema_input_type=str | list[str])
    @classmethod
    def _one_or_many(cls, stop: Any) -> Any:
        if isinstance(stop, str):
            return [stop]
        if not isinstance(stop, list):
            raise ValueError("must be a string or a list of strings")
        return stop

    @field_validator("logit_bias", mode="after")
    @classmethod
    def _few_biases(cls, biases: dict[str, float]) -> dict[str, float]:
        if len(biases) > MAX_LOGIT_BIASES:
            raise InvalidRequest(
                f"logit_bias must have at most {MAX_LOGIT_BIASES} entries, got {len(biases)}", param="logit_bias"
            )
        return biases

    @field_validator("timeout", mode="after")
    @classmethod
    def _sane_timeout(cls, timeout: float) -> float:
        if not 0.0 < timeout <= MAX_TIMEOUT_S:
            raise InvalidRequest(f"timeout must be in (0, {MAX_TIMEOUT_S:g}] seconds, got {timeout}", param="timeout")
        return timeout

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options is only allowed with stream: true", param="stream_options")
        return self

    @property
    def has_usage_chunk(self) -> bool:
        """Whether the stream ends with the usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def has_running_usage(self) -> bool:
        """Whether every chunk has the counts so far."""
        return self.has_usage_chunk and self.stream_options is not None and self.stream_options.continuous_usage_stats

    @property
    def is_event_per_token(self) -> bool:
        """Whether an event may not carry several tokens."""
        return self.stream_options is not None and self.stream_options.event_per_token

    def to_sampling(
        self,
        limits: Limits,
        *,
        max_tokens: int,
        logprobs: int | None = None,
        template_stop: tuple[str, ...] = (),
        grammar: Grammar | None = None,
    ) -> SamplingParams:
        """The only conversion into SamplingParams; raises InvalidRequest. A seed that is absent is drawn here, once.

        `template_stop`: stop strings of the chat template, which do not count among the client's own.
        """
        if len(self.stop) > MAX_OWN_STOPS:
            raise InvalidRequest(f"stop must be at most {MAX_OWN_STOPS} strings, got {len(self.stop)}", param="stop")
        vocab_size = limits.vocab_size
        for token_id in self.stop_token_ids:
            _check_token_id(token_id, vocab_size, "stop_token_ids")
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=top_k_count(self.top_k),
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias={_bias_id(key, vocab_size): bias for key, bias in self.logit_bias.items()},
            seed=random_bits(SEED_BITS) if self.seed is None else seed_bits(self.seed),
            stop=(*self.stop, *template_stop),
            stop_token_ids=tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
            min_tokens=self.min_tokens,
            grammar=grammar,
            logprobs=logprobs,
        )


class LengthFields(RequestBody):
    """The most tokens of an answer, under either of its names."""

    max_tokens: int | None = None
    max_completion_tokens: int | None = Field(default=None, description="newer name of max_tokens")

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            message = f"max_tokens and max_completion_tokens differ: {self.max_tokens}, {self.max_completion_tokens}"
            raise InvalidRequest(message, param="max_tokens")
        return self

    def length(self, limit: int, *, default: int, at_least: int = 1) -> int:
        """Raises InvalidRequest that names the field as the client wrote it."""
        for name in ("max_completion_tokens", "max_tokens"):
            given: int | None = getattr(self, name)
            if given is not None:
                return check_max_tokens(given, limit, param=name, at_least=at_least)
        return min(default, limit)


class RoutingFields(RequestBody):
    """The request for the routing of each token."""

    include_routing: bool = Field(
        default=False,
        description=f"routing of each token, in each choice; for at most {MAX_ROUTED_TOKENS} tokens in all",
    )

    def check_routing(self, *, max_tokens: int, num_choices: int = 1, param: str = "max_tokens") -> None:
        """Raises InvalidRequest for more routing than one request may have."""
        if not self.include_routing:
            return
        if num_choices > MAX_ROUTED_REQUESTS:
            message = f"include_routing is for at most {MAX_ROUTED_REQUESTS} choices, got {num_choices}"
            raise InvalidRequest(message, param="include_routing")
        if max_tokens * num_choices > MAX_ROUTED_TOKENS:
            limit = MAX_ROUTED_TOKENS // num_choices
            raise InvalidRequest(f"{param} must be at most {limit} with include_routing, got {max_tokens}", param=param)


def check_max_tokens(max_tokens: int, limit: int, *, param: str = "max_tokens", at_least: int = 1) -> int:
    """Raises InvalidRequest naming the field as the client wrote it, the limit and the given value."""
    if not at_least <= max_tokens <= limit:
        raise InvalidRequest(f"{param} must be in [{at_least}, {limit}], got {shown(max_tokens)}", param=param)
    return max_tokens


def _bias_id(key: str, vocab_size: int) -> int:
    if not (key.isascii() and key.isdigit() and len(key) <= 10):
        raise InvalidRequest(f"logit_bias must have token ids as keys, got {shown(key)}", param="logit_bias")
    return _check_token_id(int(key), vocab_size, "logit_bias")


def _check_token_id(token_id: int, vocab_size: int, param: str) -> int:
    if not 0 <= token_id < vocab_size:
        raise InvalidRequest(f"{param} must hold token ids in [0, {vocab_size - 1}], got {token_id}", param=param)
    return token_id


def with_large_ids(value: Any) -> Any:
    """`value` for the check of token ids, with integers where JSON's reader made floats of more than 64 bits."""
    if not isinstance(value, list):
        return value
    return [list(map(_large_id, item)) if isinstance(item, list) else _large_id(item) for item in value]


def _large_id(item: Any) -> Any:
    return int(item) if isinstance(item, float) and abs(item) >= 2**63 else item


def check_n(n: int, num_prompts: int, max_choices: int, *, param: str = "n") -> None:
    """How many choices one body may ask for in all: more could never be admitted at once. Raises InvalidRequest."""
    if n < 1:
        raise InvalidRequest(f"{param} must be at least 1, got {n}", param=param)
    if n * num_prompts > max_choices:
        message = f"{param} times the number of prompts must be at most {max_choices}, got {n} times {num_prompts}"
        raise InvalidRequest(message, param=param if num_prompts == 1 else "prompt")


def content_schema(part_type: dict[str, Any]) -> dict[str, Any]:
    """A message's content: a string, or text parts whose `type` is as given."""
    part = {
        "type": "object",
        "properties": {"type": part_type, "text": {"type": "string"}},
        "required": ["type", "text"],
    }
    return {"anyOf": [{"type": "string"}, {"type": "array", "items": part}]}
