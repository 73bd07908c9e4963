"""The parts of a request that Triton servers have done, and those still to do: after the loss of one, and in pieces
where the prompt is longer than they take (a session's whole log, say).
"""

from __future__ import annotations

import dataclasses

from nsm_core.engine.request import (
    EndState,
    Event,
    Finished,
    FinishReason,
    GenerationRequest,
    PromptScored,
    Resume,
    Timings,
    TokenEvent,
)
from nsm_core.errors import NsmError
from nsm_core.sampling.params import SamplingParams

# A request samples at least one token; here it is never fed, and nobody sees it.
_READ = SamplingParams(max_tokens=1, temperature=0.0, seed=0, ignore_eos=True)


class Progress:
    """Of one request. `fingerprint`: of the model that reads it."""

    def __init__(self, request: GenerationRequest, *, fingerprint: str) -> None:
        self._request = request
        self._fingerprint = fingerprint
        self._ids: list[int] = []  # sampled, beyond `sampled_ids`
        self._is_scored = False
        self._num_states = 0  # of those within the prompt
        self._pieces: list[Finished] = []  # of the prompt, read
        self._num_read = 0  # tokens in them
        self._resume = request.resume

    @property
    def has_pieces(self) -> bool:
        """Whether what comes next resumes a state of this request's own."""
        return bool(self._pieces)

    def next_request(self, max_prompt_tokens: int) -> GenerationRequest:
        """The rest of the request. It asks for nothing that the client has got."""
        request, rest = self._request, self._request.prompt_ids[self._num_read :]
        positions = tuple(position - self._num_read for position in request.keep_states_at[self._num_states :])
        shared = request.shared_prompt
        if shared is not None and self._num_read:  # each piece is a prompt of its own
            shared = dataclasses.replace(shared, name=f"{shared.name}/{self._num_read}")
        if len(rest) > max_prompt_tokens:
            return dataclasses.replace(
                request,
                prompt_ids=rest[:max_prompt_tokens],
                sampling=_READ,
                resume=self._resume,
                keep_state=True,
                prompt_logprobs=None,
                generated_counts={},
                keep_states_at=tuple(position for position in positions if position <= max_prompt_tokens),
                sampled_ids=(),
                shared_prompt=shared,
            )
        return dataclasses.replace(
            request,
            prompt_ids=rest,
            resume=self._resume,
            prompt_logprobs=None if self._is_scored else request.prompt_logprobs,
            generated_counts={} if self._pieces else request.generated_counts,
            keep_states_at=positions,
            sampled_ids=(*request.sampled_ids, *self._ids),
            shared_prompt=shared,
        )

    def take(self, asked: GenerationRequest, event: Event) -> Event | None:
        """Notes an answer to `asked`; what the client shall get of it."""
        is_piece = asked.sampling is _READ
        if isinstance(event, Finished):
            if not is_piece:
                return self._joined(event)
            self._take_piece(asked, event)
            return None
        if isinstance(event, TokenEvent):
            if is_piece:
                return None
            self._ids.append(event.token_id)
        elif isinstance(event, PromptScored):
            self._is_scored = True
        else:
            self._num_states += 1
        return event

    def take_id(self, asked: GenerationRequest, token_id: int) -> bool:
        """`take` for a plain token: whether the client shall get it."""
        is_seen = asked.sampling is not _READ
        if is_seen:
            self._ids.append(token_id)
        return is_seen

    def finished(self, reason: FinishReason, *, error: NsmError | None = None) -> Finished:
        """An end that no worker told."""
        cached = self._position
        return Finished(
            reason=reason,
            prompt_tokens=cached + len(self._request.prompt_ids),
            cached_tokens=cached,
            completion_tokens=len(self._request.sampled_ids) + len(self._ids),
            error=error,
        )

    @property
    def _position(self) -> int:
        return 0 if self._request.resume is None else self._request.resume.position

    def _take_piece(self, asked: GenerationRequest, finished: Finished) -> None:
        end, before = finished.end_state, self._request.resume
        if end is None:
            raise RuntimeError("a worker kept no state of a prompt's piece")
        counts = self._request.generated_counts if before is None else before.generated_counts
        self._resume = Resume(
            state=end.state, position=end.position, fingerprint=self._fingerprint, generated_counts=counts
        )
        self._num_read += len(asked.prompt_ids)
        self._pieces.append(finished)

    def _joined(self, last: Finished) -> Finished:
        """The end as if the prompt had been read at once."""
        if not self._pieces:
            return last
        ends, end = [*self._pieces, last], last.end_state
        return dataclasses.replace(
            last,
            cached_tokens=self._position,
            end_state=None if end is None else self._with_whole_prompt(end),
            timings=_joined_timings([piece.timings for piece in ends]),
            energy=tuple(use for piece in ends for use in piece.energy),
            shared_tokens=sum(piece.shared_tokens for piece in ends),
        )

    def _with_whole_prompt(self, end: EndState) -> EndState:
        return dataclasses.replace(end, new_ids=(*self._request.prompt_ids[: self._num_read], *end.new_ids))


def _joined_timings(timings: list[Timings | None]) -> Timings | None:
    """Only the last piece samples for the client: what the others took was its waiting for the first token."""
    known = [one for one in timings if one is not None]
    if len(known) < len(timings):
        return None
    last = known[-1]
    reading_s = sum((one.prefill_s or 0.0) + one.decode_s for one in known[:-1])
    prefill_s = None if last.prefill_s is None else last.prefill_s + reading_s
    return Timings(queue_s=sum(one.queue_s for one in known), prefill_s=prefill_s, decode_s=last.decode_s)
