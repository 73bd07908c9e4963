"""Requests with one prompt: one of them reads it, the others start from a copy of its state.

The copy is taken before the last token of the prompt, at a place where a cut changes no bits. So each of them reads the
rest itself and samples as it would alone. A request that waits keeps its place in the queue. If the reader ends before
the copy was taken, the next one reads; a request whose prompt is another one, whatever its name says, reads alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from nsm_core.engine.prompt_cuts import cuts_of
from nsm_core.engine.request import GenerationRequest
from nsm_core.engine.scheduler import Chunk, Plan, Scheduler
from nsm_core.engine.sequence import RunningSequence
from nsm_core.sampling.result import TokenLogprob
from nsm_core.state.spec import State


@dataclasses.dataclass(slots=True)
class _Shared:
    """One prompt. `length`: tokens that are read once. `members`: its requests that have not ended. `is_ready`: the
    step that read up to `state` has succeeded.
    """

    reader: RunningSequence
    length: int
    num_to_come: int
    members: set[str]
    waiting: list[RunningSequence] = dataclasses.field(default_factory=list)
    state: State | None = None
    is_ready: bool = False
    scores: list[TokenLogprob] = dataclasses.field(default_factory=list)


class SharedPrompts:
    """Of one engine. `copy`: from a slot to its state [1, *shape]. `prompt_unit`: see Executor."""

    def __init__(self, scheduler: Scheduler, *, copy: Callable[[int], State], prompt_unit: int) -> None:
        self._scheduler, self._copy, self._unit = scheduler, copy, prompt_unit
        self._by_name: dict[str, _Shared] = {}

    def queue(self, sequence: RunningSequence) -> None:
        """Puts a request in the scheduler's queue. Raises Overloaded; then nothing of it is kept here."""
        request = sequence.request
        shared = self._of(request)
        length = self._length_of(request)
        if request.shared_prompt is None or length == 0 or (shared is not None and not _may_share(sequence, shared)):
            self._add(sequence, boundaries=request.keep_states_at)
        elif shared is None:
            self._add(sequence, boundaries=_with(length, request.keep_states_at))
            self._by_name[request.shared_prompt.name] = _Shared(
                sequence, length, request.shared_prompt.num_requests - 1, {request.request_id}
            )
        else:
            self._add(sequence, boundaries=_with(length, request.keep_states_at), is_held=True)
            shared.num_to_come -= 1
            shared.members.add(request.request_id)
            shared.waiting.append(sequence)
            self._hand_out(shared)

    def took_part(self, plan: Plan, running: Mapping[int, RunningSequence]) -> None:
        """After the plan was run or launched: takes the copies that are due."""
        if not self._by_name:
            return
        for chunk in plan.prefill:
            shared = self._read_to_its_end(running[chunk.slot], chunk)
            if shared is not None:
                shared.state = self._copy(chunk.slot)

    def hand_out(self, plan: Plan, sequences: Mapping[int, RunningSequence]) -> None:
        """After the plan has succeeded and its scores were noted: whoever waits for its copies may go on."""
        if not self._by_name:
            return
        for chunk in plan.prefill:
            sequence = sequences[chunk.slot]
            shared = self._read_to_its_end(sequence, chunk)
            if shared is None:
                continue
            shared.scores = list(sequence.prompt_scores)
            is_scored = sequence.request.prompt_logprobs is None or len(shared.scores) == shared.length
            shared.is_ready = is_scored and shared.state is not None
            self._hand_out(shared)

    def ended(self, sequence: RunningSequence, *, is_state_good: bool) -> None:
        """A request has ended. `is_state_good`: False after a failed step, whose copy is worth nothing."""
        shared = self._of(sequence.request)
        if shared is None or sequence.request.request_id not in shared.members:
            return
        shared.members.discard(sequence.request.request_id)
        shared.waiting = [waiting for waiting in shared.waiting if waiting is not sequence]
        if shared.reader is sequence and not (shared.is_ready and is_state_good):
            shared.state, shared.is_ready = None, False
        if not shared.members:
            self._forget(sequence.request)
        elif shared.reader is sequence and not shared.is_ready:
            self._read_anew(sequence.request, shared)

    def _read_anew(self, request: GenerationRequest, shared: _Shared) -> None:
        """The next request that waits becomes the reader."""
        if not shared.waiting:  # those that have left with a copy need nothing more
            self._forget(request)
            return
        shared.reader = shared.waiting.pop(0)
        self._scheduler.release(shared.reader.request.request_id, num_read=0)

    def _hand_out(self, shared: _Shared) -> None:
        if not shared.is_ready:
            return
        for sequence in shared.waiting:
            sequence.shared_start, sequence.num_shared = shared.state, shared.length
            sequence.prompt_scores = list(shared.scores)
            self._scheduler.release(sequence.request.request_id, num_read=shared.length)
        shared.waiting = []
        if shared.num_to_come <= 0:
            self._forget(shared.reader.request)

    def _forget(self, request: GenerationRequest) -> None:
        if request.shared_prompt is not None:
            del self._by_name[request.shared_prompt.name]

    def _add(self, sequence: RunningSequence, *, boundaries: tuple[int, ...], is_held: bool = False) -> None:
        request, length = sequence.request, len(sequence.read_ids)
        sampled_at = (*request.sampled_at, (len(request.prompt_ids), length))
        self._scheduler.add(
            request.request_id,
            prompt_len=length,
            boundaries=cuts_of(length, sampled_at, wanted=boundaries, unit=self._unit),
            is_held=is_held,
            owner=request.owner,
            is_background=request.is_background,
        )

    def _read_to_its_end(self, sequence: RunningSequence, chunk: Chunk) -> _Shared | None:
        """The shared prompt whose reader is `sequence`, if `chunk` ends it; None for any other chunk."""
        shared = self._of(sequence.request)
        if shared is None or shared.reader is not sequence or chunk.start + chunk.length != shared.length:
            return None
        return shared

    def _of(self, request: GenerationRequest) -> _Shared | None:
        return None if request.shared_prompt is None else self._by_name.get(request.shared_prompt.name)

    def _length_of(self, request: GenerationRequest) -> int:
        """Tokens that may be read once: all but the last, in whole units."""
        return (len(request.prompt_ids) - 1) // self._unit * self._unit


def _may_share(sequence: RunningSequence, shared: _Shared) -> bool:
    """Whether the start is the same and nothing is wanted of the part that another one reads."""
    request, other = sequence.request, shared.reader.request
    is_same = (request.prompt_ids, request.prompt_logprobs) == (other.prompt_ids, other.prompt_logprobs)
    is_after = not request.keep_states_at or request.keep_states_at[0] > shared.length
    return is_same and is_after and _start_of(request) == _start_of(other)


def _start_of(request: GenerationRequest) -> tuple[int, bytes, int | None] | None:
    resume = request.resume
    return None if resume is None else (resume.position, resume.state, resume.held)


def _with(length: int, positions: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted({length, *positions}))
