"""A client's side of a streamed call to a Triton worker."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from nsm_core.engine.request import (
    EndState,
    Event,
    Finished,
    FinishReason,
    PromptScored,
    PromptState,
    Timings,
    TokenEvent,
)
from nsm_core.sampling.result import TokenLogprob
from nsm_core.stats import EnergyUse
from nsm_core.wire.call_tensors import decode_resume
from nsm_core.wire.calls import GenerateCall
from nsm_core.wire.errors import reading_answer
from nsm_core.wire.tensors import (
    DETAILS,
    FINISH_REASON,
    STATE,
    TEXT_OUTPUT,
    TOKEN_IDS,
    Tensors,
    read_bytes,
    read_ids,
    read_json,
    read_text,
    refuse,
)


class EventDecoder:
    """Tensors back into an engine's events."""

    def __init__(self, call: GenerateCall) -> None:
        pending = () if call.resume is None or call.resume.pending is None else (call.resume.pending,)
        self._prompt_ids = pending + (call.prompt_ids or ())
        self._num_tokens = len(call.sampled_ids)
        self._caches_state = call.keep_state
        self.cached_state_id: str | None = None  # of the end state, where the call had the worker keep it

    @property
    def num_tokens(self) -> int:
        """Tokens sampled so far, `sampled_ids` included."""
        return self._num_tokens

    def decode(self, tensors: Tensors) -> tuple[Event, ...]:
        """The events of one answer, at least one. Raises EngineDead for any other answer.

        An end state comes only with its bytes (`return_state`).
        """
        with reading_answer():
            text = read_text(tensors, TEXT_OUTPUT)
            if text is None:
                refuse(TEXT_OUTPUT, "in every event", sorted(tensors))
            return self._decode(text, read_json(tensors, DETAILS) or {}, tensors)

    def _decode(self, text: str, details: dict[str, Any], tensors: Tensors) -> tuple[Event, ...]:
        reason = read_text(tensors, FINISH_REASON)
        if reason is not None:
            return (self._decode_end(FinishReason(reason), text, details, read_bytes(tensors, STATE)),)
        if "prompt_logprobs" in details:
            return (PromptScored(logprobs=tuple(_read_logprob(score) for score in details["prompt_logprobs"])),)
        if "prompt_position" in details:
            return (PromptState(position=details["prompt_position"], state=_required(read_bytes(tensors, STATE))),)
        return tuple(self._decode_tokens(read_ids(tensors, TOKEN_IDS) or (), text, details))

    def _decode_tokens(self, ids: Sequence[int], text: str, details: dict[str, Any]) -> Iterator[TokenEvent]:
        if not ids:
            refuse(TOKEN_IDS, "given where there is nothing else", sorted(details))
        texts = details["texts"] if len(ids) > 1 else [text]
        scores = details.get("logprobs", [None] * len(ids))
        for token_id, piece, score in zip(ids, texts, scores, strict=True):
            self._num_tokens += 1
            yield TokenEvent(index=self._num_tokens, token_id=token_id, text=piece, logprob=_read_logprob(score))

    def _decode_end(self, reason: FinishReason, text: str, details: dict[str, Any], state: bytes | None) -> Finished:
        end = None
        if state is not None:
            point = decode_resume(details["resume"])
            self.cached_state_id = point.state_id if self._caches_state else None
            end = EndState(
                state=state,
                position=point.position,
                pending=point.pending,
                new_ids=(*self._prompt_ids, *details["kept_ids"]),
                generated_counts=point.generated_counts,
            )
        return Finished(
            reason=reason,
            text=text,
            stop_reason=details["stop_reason"],
            num_dropped_tokens=details["num_dropped_tokens"],
            tail=bytes(details["tail"]),
            prompt_tokens=details["prompt_tokens"],
            cached_tokens=details["cached_tokens"],
            completion_tokens=details["completion_tokens"],
            end_state=end,
            timings=Timings(**details["timings"]) if "timings" in details else None,
            energy=tuple(EnergyUse(**use) for use in details.get("energy", ())),
            shared_tokens=details.get("shared_tokens", 0),
        )


def _read_logprob(value: Any) -> TokenLogprob | None:
    if value is None:
        return None
    top = tuple((token_id, logprob) for token_id, logprob in value["top"])
    return TokenLogprob(token_id=value["token_id"], logprob=value["logprob"], top=top)


def _required(state: bytes | None) -> bytes:
    if state is None:
        refuse(STATE, "given with prompt_position", None)
    return state
