"""The body of POST /v1/completions."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, WithJsonSchema, field_validator, model_validator

from nsm_core.errors import InvalidRequest
from nsm_core.sampling.params import MAX_TOP_LOGPROBS
from service.schemas.common import (
    IGNORED,
    UNSUPPORTED,
    LengthFields,
    Limits,
    RequestSpec,
    RoutingFields,
    SamplingFields,
    check_n,
    with_large_ids,
)
from service.schemas.start_state import StateFields
from service.schemas.structured import StructuredFields
from service.web.errors import shown

DEFAULT_MAX_TOKENS = 16
PROMPT_SCHEMA = {
    "description": "a text, token ids, or a list of either",
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}},
        {"type": "array", "items": {"type": "integer"}},
        {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
    ],
}


class CompletionBody(SamplingFields, StructuredFields, LengthFields, RoutingFields, StateFields):
    """`prompt` is a text or token ids, or a list of either; `n` choices are made for each."""

    ignored = IGNORED
    unsupported = UNSUPPORTED

    model: str | None = None
    prompt: Annotated[Any, WithJsonSchema(PROMPT_SCHEMA)]
    max_tokens: int | None = Field(
        default=None, description=f"default {DEFAULT_MAX_TOKENS}; 0 is allowed with echo: score the prompt only"
    )
    n: int = 1
    best_of: int | None = Field(
        default=None,
        description="make so many choices for each prompt, at least n, and answer with the n most likely; no stream",
    )
    echo: bool = False
    logprobs: int | None = Field(default=None, description=f"at most {MAX_TOP_LOGPROBS}")
    cache_prompt: bool = Field(
        default=True, description="start from a stored state of the prompt's beginning, and keep such states"
    )

    @field_validator("prompt", mode="after")
    @classmethod
    def _prompt_kind(cls, prompt: Any) -> Any:
        if _is_prompt(prompt):
            return prompt
        if _is_prompt(exact := with_large_ids(prompt)):
            return exact
        kinds = "a string, a list of strings, a list of token ids, or a list of such lists"
        given = "an empty list" if prompt == [] else shown(prompt)
        raise InvalidRequest(f"prompt must be {kinds}, got {given}", param="prompt")

    @model_validator(mode="after")
    def _fields_fit(self) -> CompletionBody:
        if self.best_of is not None and self.best_of < self.n:
            raise InvalidRequest(f"best_of must be at least n ({self.n}), got {self.best_of}", param="best_of")
        if self.stream and self.num_candidates > self.n:
            raise InvalidRequest("best_of above n is not allowed with stream: true", param="best_of")
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_TOP_LOGPROBS:
            raise InvalidRequest(f"logprobs must be in [0, {MAX_TOP_LOGPROBS}], got {self.logprobs}", param="logprobs")
        return self

    @property
    def num_candidates(self) -> int:
        """Choices that are made for each prompt."""
        return self.n if self.best_of is None else self.best_of

    def to_request(self, limits: Limits) -> RequestSpec:
        """Raises InvalidRequest."""
        is_batch = isinstance(self.prompt, list) and not _is_ids(self.prompt)
        prompts = tuple(self.prompt) if is_batch else (self.prompt,)
        check_n(self.n, len(prompts), limits.max_choices)
        check_n(self.num_candidates, len(prompts), limits.max_choices, param="best_of")
        length = self.length(limits.max_tokens, default=DEFAULT_MAX_TOKENS, at_least=0 if self.echo else 1)
        self.check_routing(max_tokens=length, num_choices=self.num_candidates * len(prompts))
        is_score_only = self.echo and length == 0
        self.check_returned(self.num_candidates * len(prompts), is_score_only=is_score_only)
        has_scores = self.echo and (self.logprobs is not None or is_score_only)
        is_ranked = self.num_candidates > self.n
        logprobs = 0 if is_ranked and self.logprobs is None else self.logprobs
        max_tokens = max(1, length)  # score only: the request ends before a token is sampled
        return RequestSpec(
            prompts=prompts,
            n=self.num_candidates,
            sampling=self.to_sampling(limits, max_tokens=max_tokens, logprobs=logprobs, grammar=self.to_grammar()),
            timeout_s=self.timeout or limits.timeout_s,
            prompt_logprobs=(self.logprobs or 0) if has_scores else None,
            is_score_only=is_score_only,
            include_routing=self.include_routing,
            state=self.state,
            return_state=self.return_state,
        )


def _is_prompt(value: Any) -> bool:
    if isinstance(value, str) or _is_list_of(value, str) or _is_ids(value):
        return True
    return isinstance(value, list) and bool(value) and all(map(_is_ids, value))


def _is_ids(value: Any) -> bool:
    return _is_list_of(value, int)


def _is_list_of(value: Any, kind: type) -> bool:
    """A list that is not empty and holds exactly `kind`: true is no token id."""
    return isinstance(value, list) and bool(value) and all(type(item) is kind for item in value)
