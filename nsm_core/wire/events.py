"""A worker's answers: an engine's events as tensors and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
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
from nsm_core.wire.call_tensors import decode_resume, encode_resume
from nsm_core.wire.calls import GenerateCall, ResumePoint, state_id
from nsm_core.wire.errors import reading_answer
from nsm_core.wire.tensors import (
    DETAILS,
    FINISH_REASON,
    STATE,
    TEXT_OUTPUT,
    TOKEN_IDS,
    Tensors,
    bytes_array,
    ids_array,
    json_array,
    read_bytes,
    read_ids,
    read_json,
    read_text,
    refuse,
    text_array,
)


class EventEncoder:
    """The worker's side, for one call.

    `num_prompt`: tokens of the request's prompt, a pending one included. `name_state` gives a state's id, and may keep
    the state.
    """

    def __init__(
        self,
        call: GenerateCall,
        *,
        fingerprint: str,
        num_prompt: int,
        name_state: Callable[[bytes], str] = state_id,
    ) -> None:
        self._call = call
        self._fingerprint = fingerprint
        self._num_prompt = num_prompt
        self._name_state = name_state

    def encode_tokens(self, tokens: Sequence[TokenEvent]) -> dict[str, Any]:
        """Successive tokens of a stream as one answer: a worker that is behind sends fewer, longer ones."""
        tensors = {
            TEXT_OUTPUT: text_array("".join(token.text for token in tokens)),
            TOKEN_IDS: ids_array([token.token_id for token in tokens]),
        }
        details: dict[str, Any] = {}
        if len(tokens) > 1:
            details["texts"] = [token.text for token in tokens]
        if tokens[0].logprob is not None:
            details["logprobs"] = [_logprob_json(token.logprob) for token in tokens]
        return {**tensors, DETAILS: json_array(details)} if details else tensors

    def encode(self, event: PromptScored | PromptState | Finished) -> dict[str, Any]:
        """One event of a stream that is no token; `Finished.error` is not part of it, see `errors.py`."""
        if isinstance(event, PromptScored):
            return _beside({"prompt_logprobs": [_logprob_json(score) for score in event.logprobs]})
        if isinstance(event, PromptState):
            details = {"prompt_position": event.position, "state_id": self._name_state(event.state)}
            return {**_beside(details), STATE: bytes_array(event.state)}
        return self._encode_end(event, self._end_details(event))

    def encode_whole(self, events: Sequence[Event]) -> dict[str, Any]:
        """All events of a request that ended well as one answer: the texts joined, every id, every logprob."""
        finished = events[-1]
        if not isinstance(finished, Finished):
            raise ValueError("the last event of a request is Finished")
        details = self._end_details(finished)
        tokens = [event for event in events if isinstance(event, TokenEvent)]
        for event in events:
            if isinstance(event, PromptScored):
                details["prompt_logprobs"] = [_logprob_json(score) for score in event.logprobs]
        if any(token.logprob is not None for token in tokens):
            details["logprobs"] = [_logprob_json(token.logprob) for token in tokens]
        text = "".join(token.text for token in tokens) + finished.text
        tensors = {**self._encode_end(finished, details), TEXT_OUTPUT: text_array(text)}
        return {**tensors, TOKEN_IDS: ids_array([token.token_id for token in tokens])} if tokens else tensors

    def _encode_end(self, finished: Finished, details: dict[str, Any]) -> dict[str, Any]:
        tensors = {
            TEXT_OUTPUT: text_array(finished.text),
            FINISH_REASON: text_array(finished.reason),
            DETAILS: json_array(details),
        }
        if finished.end_state is not None and self._call.return_state:
            tensors[STATE] = bytes_array(finished.end_state.state)
        return tensors

    def _end_details(self, finished: Finished) -> dict[str, Any]:
        details: dict[str, Any] = {
            "prompt_tokens": finished.prompt_tokens,
            "cached_tokens": finished.cached_tokens,
            "completion_tokens": finished.completion_tokens,
            "stop_reason": finished.stop_reason,
            "num_dropped_tokens": finished.num_dropped_tokens,
            "tail": list(finished.tail),
        }
        if finished.timings is not None:
            details["timings"] = dataclasses.asdict(finished.timings)
        if finished.shared_tokens:
            details["shared_tokens"] = finished.shared_tokens
        if finished.energy:
            details["energy"] = [dataclasses.asdict(use) for use in finished.energy]
        end = finished.end_state
        if end is not None:
            point = ResumePoint(
                position=end.position,
                fingerprint=self._fingerprint,
                generated_counts=end.generated_counts,
                pending=end.pending,
                state_id=self._name_state(end.state),
            )
            # the prompt need not travel back
            details |= {"resume": encode_resume(point), "kept_ids": end.new_ids[self._num_prompt :]}
        return details


class EventDecoder:
    """The gateway's side, for one streamed call: tensors back into an engine's events."""

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


def _beside(details: dict[str, Any]) -> dict[str, Any]:
    """An event without text of its own."""
    return {TEXT_OUTPUT: text_array(""), DETAILS: json_array(details)}


def _logprob_json(score: TokenLogprob | None) -> dict[str, Any] | None:
    return None if score is None else {"token_id": score.token_id, "logprob": score.logprob, "top": score.top}


def _read_logprob(value: Any) -> TokenLogprob | None:
    if value is None:
        return None
    top = tuple((token_id, logprob) for token_id, logprob in value["top"])
    return TokenLogprob(token_id=value["token_id"], logprob=value["logprob"], top=top)


def _required(state: bytes | None) -> bytes:
    if state is None:
        refuse(STATE, "given with prompt_position", None)
    return state
