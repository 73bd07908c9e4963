"""A worker's answers to one call: an engine's events as tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from nsm_core.engine.request import (
    Event,
    Finished,
    PromptScored,
    PromptState,
    TokenEvent,
)
from nsm_core.sampling.result import TokenLogprob
from nsm_core.wire.call_tensors import encode_resume
from nsm_core.wire.calls import GenerateCall, ResumePoint, state_id
from nsm_core.wire.tensors import (
    DETAILS,
    FINISH_REASON,
    STATE,
    TEXT_OUTPUT,
    TOKEN_IDS,
    bytes_array,
    ids_array,
    json_array,
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


def _beside(details: dict[str, Any]) -> dict[str, Any]:
    """An event without text of its own."""
    return {TEXT_OUTPUT: text_array(""), DETAILS: json_array(details)}


def _logprob_json(score: TokenLogprob | None) -> dict[str, Any] | None:
    return None if score is None else {"token_id": score.token_id, "logprob": score.logprob, "top": score.top}
