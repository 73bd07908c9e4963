"""The shapes of OpenAI's completion objects: envelope, usage, log-probabilities; and routing, which is ours."""

from __future__ import annotations

import codecs
import dataclasses
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from nsm_core.engine.request import Finished, FinishReason, TokenLogprob, joules_of
from nsm_core.inspection.routing import LayerRouting
from nsm_core.random_ids import random_id
from nsm_core.stats import EnergyUse, add_energy
from nsm_core.tokenizer import END_OF_TEXT, Tokenizer
from service.generate.deltas import ScoredToken

LEAST_LOGPROB = -9999.0  # JSON has no -Infinity


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """What all objects of one answer have in common."""

    id: str
    created: int  # unix seconds
    model: str
    system_fingerprint: str

    @classmethod
    def new(cls, prefix: str, *, model: str, system_fingerprint: str) -> Envelope:
        """A fresh id, the time of now."""
        identity = f"{prefix}-{random_id()}"
        return cls(id=identity, created=int(time.time()), model=model, system_fingerprint=system_fingerprint)

    def wrap(self, kind: str, choices: Sequence[Mapping[str, Any]], **fields: Any) -> dict[str, Any]:
        """One object of `kind`; `fields` follow the choices."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.system_fingerprint,
            "choices": list(choices),
            **fields,
        }


def usage(ends: Sequence[Finished], *, choices_per_prompt: int = 1, has_energy: bool = False) -> dict[str, Any]:
    """Counts of all choices; a prompt counts once, however many choices stand on it. `has_energy`: with its joules."""
    firsts = ends[::choices_per_prompt]
    prompt_tokens = sum(end.prompt_tokens for end in firsts)
    completion_tokens = sum(end.completion_tokens for end in ends)
    details = {"cached_tokens": sum(end.cached_tokens for end in firsts)}
    if replayed_tokens := sum(end.replayed_tokens for end in firsts):
        details["replayed_tokens"] = replayed_tokens
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": details,
        **({"energy": energy_of(ends)} if has_energy else {}),
    }


def energy_of(ends: Sequence[Finished]) -> dict[str, Any] | None:
    """Joules of all choices, by source and by how they are known; None where nothing is measured."""
    uses: tuple[EnergyUse, ...] = ()
    for end in ends:
        uses = add_energy(uses, end.energy)
    if not uses:
        return None
    joules, num_tokens = joules_of(ends), sum(end.completion_tokens for end in ends)
    return {
        "joules": joules,
        "joules_per_token": joules / num_tokens if num_tokens else None,
        "sources": [dataclasses.asdict(use) for use in uses],
    }


def finish_reason(end: Finished) -> str:
    """Only these two ends reach a client as a reason; the others are errors."""
    return "stop" if end.reason is FinishReason.STOP else "length"


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """A token for a person; one that is a part of a character shows its bytes, so that no two of them look alike."""
    return END_OF_TEXT if token_id == tokenizer.end_of_text_id else _bytes_text(tokenizer.token_bytes(token_id))


def _visible_text(tokenizer: Tokenizer, token: ScoredToken) -> str:
    return END_OF_TEXT if token.token_id == tokenizer.end_of_text_id else _bytes_text(token.raw)


def _bytes_text(raw: bytes) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def routing_of(tokens: Iterable[ScoredToken]) -> list[dict[str, Any]]:
    """The `routing` of a choice, see docs/inspection.md."""
    return [
        {
            "token_id": token.token_id,
            "position": token.routing.position,
            "layers": [_layer_routing(layer) for layer in token.routing.layers],
        }
        for token in tokens
        if token.routing is not None
    ]


def _layer_routing(layer: LayerRouting) -> dict[str, Any]:
    return {
        "layer": layer.layer,
        "kind": layer.kind,
        "num_states": layer.num_states,
        "num_heads": layer.num_heads,
        "entropy": layer.entropy,
        "states_per_token": layer.states_per_token,
        "write": layer.write,
        "read": layer.read,
    }


def chat_logprobs(tokenizer: Tokenizer, tokens: Iterable[ScoredToken]) -> dict[str, Any]:
    """The `logprobs` of a chat choice."""
    content = [_chat_token(tokenizer, token, token.logprob) for token in tokens if token.logprob is not None]
    return {"content": content, "refusal": None}


def _chat_token(tokenizer: Tokenizer, token: ScoredToken, scored: TokenLogprob) -> dict[str, Any]:
    """A token that the text cuts is shown as its visible part, among the alternatives too."""
    visible = {"token": _visible_text(tokenizer, token), "bytes": list(token.raw)}
    top = [
        {**(visible if token_id == token.token_id else _chat_alternative(tokenizer, token_id)), **_score(logprob)}
        for token_id, logprob in scored.top
    ]
    return {**visible, **_score(scored.logprob), "top_logprobs": top}


def _chat_alternative(tokenizer: Tokenizer, token_id: int) -> dict[str, Any]:
    return {"token": token_text(tokenizer, token_id), "bytes": list(tokenizer.token_bytes(token_id))}


def _score(logprob: float) -> dict[str, float]:
    return {"logprob": max(logprob, LEAST_LOGPROB)}


class LegacyLogprobs:
    """The `logprobs` of a completion choice, piece by piece; `text_offset` counts characters of the choice."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._offset = 0
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def render(self, tokens: Iterable[ScoredToken]) -> dict[str, Any]:
        """Tokens follow those of the call before."""
        scored: list[ScoredToken] = list(tokens)
        return {
            "tokens": [_visible_text(self._tokenizer, token) for token in scored],
            "token_logprobs": [
                None if token.logprob is None else max(token.logprob.logprob, LEAST_LOGPROB) for token in scored
            ],
            "top_logprobs": [self._top(token) for token in scored],
            "text_offset": [self._advance(token.raw) for token in scored],
        }

    def end_prompt(self) -> None:
        """The prompt's text is complete: an unfinished character at its end does not join the answer's bytes."""
        self._offset += len(self._utf8.decode(b"", final=True))
        self._utf8.reset()

    def _advance(self, raw: bytes) -> int:
        start = self._offset
        self._offset += len(self._utf8.decode(raw))
        return start

    def _top(self, token: ScoredToken) -> dict[str, float] | None:
        """The most likely tokens, and always the token itself, as it stands in `tokens`."""
        scored = token.logprob
        if scored is None:
            return None
        others = [
            (token_text(self._tokenizer, other), logprob) for other, logprob in scored.top if other != token.token_id
        ]
        own = (_visible_text(self._tokenizer, token), scored.logprob)
        return {text: max(logprob, LEAST_LOGPROB) for text, logprob in [*others, own]}
