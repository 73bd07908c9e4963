"""Applies the results of steps to their requests: events and ends. Requests end only here."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from nsm_core.engine.active_requests import ActiveRequests
from nsm_core.engine.held_states import HeldStates
from nsm_core.engine.output import OutputStep, StopMatch
from nsm_core.engine.overlap import InFlightStep, OverlapBlockers
from nsm_core.engine.request import EndState, Event, Finished, FinishReason, PromptScored, PromptState, TokenEvent
from nsm_core.engine.runner import Runner, Sampled, StepResult
from nsm_core.engine.scheduler import Chunk, Plan, Scheduler
from nsm_core.engine.sequence import RunningSequence
from nsm_core.engine.shared_prompts import SharedPrompts
from nsm_core.engine.speculation import Drafts, Speculation
from nsm_core.engine.step_stats import StepStats
from nsm_core.engine.token_rows import TokenBatch, TokenRows
from nsm_core.errors import GrammarFailed, NsmError, StepFailed
from nsm_core.inspection.routing import TokenRouting
from nsm_core.sampling.result import NOT_FINITE, SKIPPED, SampledToken
from nsm_core.sampling.sampler import not_finite
from nsm_core.state.spec import State
from nsm_core.tokenizer import Tokenizer

# Events of one step, each with the id of its request.
Events = list[tuple[str, Event]]


class ResultApplier:
    """Turns sampled tokens into events, and ends requests, for one engine."""

    def __init__(
        self,
        *,
        active: ActiveRequests,
        scheduler: Scheduler,
        shared: SharedPrompts,
        runner: Runner,
        stats: StepStats,
        speculation: Speculation,
        blockers: OverlapBlockers,
        token_rows: TokenRows,
        tokenizer: Tokenizer,
        held: HeldStates,
        clock: Callable[[], float],
    ) -> None:
        self._active, self._scheduler, self._runner, self._stats = active, scheduler, runner, stats
        self._shared, self._held = shared, held
        self._speculation, self._blockers = speculation, blockers
        self._token_rows = token_rows
        self._batches: list[TokenBatch] = []
        self._tokenizer, self._clock = tokenizer, clock
        self._last_end_at = 0.0  # end of the last step that was in flight, by the monotonic clock

    def take_tokens(self) -> list[TokenBatch]:
        """Plain tokens since the last call."""
        batches, self._batches = self._batches, []
        return batches

    def seconds_of(self, step: InFlightStep) -> float:
        """The time that a step in flight has taken so far; it starts when the step before it has ended."""
        return time.monotonic() - max(step.launched_at, self._last_end_at)

    def apply(
        self, plan: Plan, result: StepResult, routing: Mapping[int, TokenRouting], events: Events, drafts: Drafts
    ) -> None:
        """The result of a step that was waited for."""
        for slot, scores in result.scored.items():
            self._active.running[slot].prompt_scores += scores
        self._shared.hand_out(plan, self._active.running)
        for chunk in plan.prefill:
            if chunk.start + chunk.length in self._active.running[chunk.slot].request.keep_states_at:
                # a step that sampled nothing was not waited for
                self._add_prompt_state(chunk, self._runner.pack(chunk.slot, is_complete=False))
        taken = self._take_plain(result.sampled)
        for slot, sampled in result.sampled.items():
            if slot in taken:
                continue
            if slot in drafts:
                self._append_accepted(slot, [sampled, *result.further[slot]], len(drafts[slot]), events)
            else:
                self._append_or_fail(slot, sampled, routing.get(slot), events)
        self._blockers.refresh(self._active.running)

    def _take_plain(self, sampled: Mapping[int, Sampled]) -> Container[int]:
        """Of a step that was waited for, in an engine whose steps may overlap: the slots whose tokens were plain."""
        if self._token_rows.is_empty:
            return ()
        rows = [
            (slot, token.token_id)
            for slot, token in sampled.items()
            if isinstance(token, SampledToken) and not self._active.running[slot].request.sampled_ids
        ]
        if not rows:
            return ()
        slots, ids = np.array(rows, np.int64).T
        tags = self._token_rows.tags[slots]
        (is_plain,) = self._token_rows.take_plain(slots, tags, ids[None])
        if not is_plain.any():
            return ()
        self._add_batch(tags[is_plain], ids[is_plain])
        return frozenset(slots[is_plain].tolist())

    def _add_batch(self, tags: npt.NDArray[np.int64], ids: npt.NDArray[np.int64]) -> None:
        self._batches.append(TokenBatch(tags, ids))
        self._stats.counters.tokens_generated += len(ids)

    def apply_slice(self, slots: Sequence[int], tokens: npt.NDArray[np.int64], events: Events) -> None:
        """tokens [rounds, len(slots)] of a slice: all but those of the last round only add text."""
        for slot, ids in zip(slots, tokens.T.tolist(), strict=True):
            sequence = self._active.running[slot]
            for token_id in ids:
                if not self._append_plain(sequence, token_id, events):
                    self._append_or_fail(slot, _sampled_of(sequence, token_id), None, events)
        self._blockers.refresh(self._active.running)

    def apply_in_flight(
        self, step: InFlightStep, ids: npt.NDArray[np.int64], following: InFlightStep | None, events: Events
    ) -> None:
        """The `ids` [rounds, slots] of a step that was in flight; `following` still is."""
        running = self._active.running
        seconds, self._last_end_at = self.seconds_of(step), time.monotonic()
        is_running = self._token_rows.tags[step.rows] == step.tags
        num_rounds, num_decoded = _work_of(step.rows[is_running], ids[:, is_running])
        plan = step.effective_plan(running)
        self._stats.record(plan, running, seconds, {}, num_rounds=num_rounds, num_decoded=num_decoded)
        for chunk in step.plan.prefill if step.prompt_states else ():
            if chunk.slot in step.prompt_states and running.get(chunk.slot) is step.sequences[chunk.slot]:
                self._add_prompt_state(chunk, self._runner.pack_copy(step.prompt_states[chunk.slot]))
        self._shared.hand_out(step.plan, step.sequences)
        is_plain = self._token_rows.take_plain(step.rows, step.tags, ids)
        numbers = is_plain.sum(axis=0)
        if numbers.any():
            self._token_rows.landed(step.rows, numbers)
            self._add_batch(np.broadcast_to(step.tags, ids.shape)[is_plain], ids[is_plain])
        for index in np.flatnonzero(numbers < len(ids)).tolist():
            self._append_others(step, index, ids[numbers[index] :, index].tolist(), following, events)

    def _append_others(
        self, step: InFlightStep, index: int, ids: Sequence[int], following: InFlightStep | None, events: Events
    ) -> None:
        """The tokens of a row after those that were plain, until one ends its request."""
        slot = step.slots[index]
        sequence = step.sequences[slot]
        for token_id in ids:
            if self._active.running.get(slot) is not sequence or slot in step.paused:
                return  # it ended, and the slot may be another's; or it skipped the step
            if token_id == SKIPPED:
                raise RuntimeError("the device skipped a row whose request has not ended")
            sequence.landed()
            if not self._append_plain(sequence, token_id, events):
                self._append_in_flight(slot, token_id, following, events)

    def _append_in_flight(self, slot: int, token_id: int, following: InFlightStep | None, events: Events) -> None:
        sequence = self._active.running[slot]
        self._append_or_fail(slot, _sampled_of(sequence, token_id), None, events)
        if sequence.may_rewind and self._active.has(sequence):
            if following is not None and token_id in sequence.pausing_ids:
                following.pause(slot, sequence)
            self._blockers.update(slot, sequence)

    def fail(self, sequences: Iterable[RunningSequence], error: StepFailed, events: Events) -> None:
        """Ends the sequences that are still active. Their states are undefined and not returned."""
        self._stats.counters.num_failed_steps += 1
        for sequence in sequences:
            if self._active.has(sequence):
                events += self.finish(sequence, FinishReason.ERROR, error=error)

    def _append_accepted(self, slot: int, sampled: Sequence[Sampled], num_drafted: int, events: Events) -> None:
        """The tokens sampled before the first draft and after each accepted one, up to one that ends the request."""
        sequence = self._active.running[slot]
        num_before = len(sequence.sampled)
        for token in sampled:
            self._append_or_fail(slot, token, None, events)
            if slot not in self._active.running:
                break
        num_accepted = min(len(sequence.sampled) - num_before, len(sampled) - 1)
        self._stats.record_drafts(num_drafted=num_drafted, num_accepted=num_accepted)
        self._speculation.record(slot, num_drafted=num_drafted, num_accepted=num_accepted)

    def _append_or_fail(self, slot: int, sampled: Sampled, routing: TokenRouting | None, events: Events) -> None:
        error: NsmError | None = None
        try:
            if isinstance(sampled, SampledToken):
                self._append(slot, sampled, routing, events)
            else:
                error = sampled
        except GrammarFailed as failure:
            error = failure
        if error is not None:
            events += self.finish(self._active.running[slot], FinishReason.ERROR, error=error)

    def _add_prompt_state(self, chunk: Chunk, state: bytes) -> None:
        sequence = self._active.running[chunk.slot]
        position = sequence.resumed_position + chunk.start + chunk.length
        sequence.prompt_states.append(PromptState(position=position, state=state))

    def _append_plain(self, sequence: RunningSequence, token_id: int, events: Events) -> bool:
        """Appends a token that only adds text, as most do. Returns whether it was one."""
        text = sequence.append_plain(token_id)
        if text is None:
            return False
        self._stats.counters.tokens_generated += 1
        token = TokenEvent(index=len(sequence.sampled), token_id=token_id, text=text)
        events.append((sequence.request.request_id, token))
        if sequence.matcher is not None and sequence.matcher.is_complete:
            events += self.finish(sequence, FinishReason.STOP)
        return True

    def _append(self, slot: int, sampled: SampledToken, routing: TokenRouting | None, events: Events) -> None:
        """Appends a token, and ends the request if it was the last."""
        sequence = self._active.running[slot]
        request = sequence.request
        if sampled.logprob is None and routing is None and self._append_plain(sequence, sampled.token_id, events):
            return
        self._stats.counters.tokens_generated += 1
        if sequence.timeline.first_token is None:
            sequence.timeline.first_token = self._clock()
        if request.prompt_logprobs is not None and not sequence.sampled:
            events.append((request.request_id, PromptScored(logprobs=(None, *sequence.prompt_scores))))
        if sequence.prompt_states:
            events += [(request.request_id, state) for state in sequence.pop_prompt_states()]
        forced_id = sequence.forced_id if request.sampled_ids else None
        step = sequence.append(sampled.token_id if forced_id is None else forced_id)
        index = len(sequence.sampled)
        if forced_id is None:
            # The token that stops is not visible itself: text that it released comes with Finished
            text = step.text if step.stop is None else ""
            token = TokenEvent(
                index=index, token_id=sampled.token_id, text=text, logprob=sampled.logprob, routing=routing
            )
            events.append((request.request_id, token))
        self._end_or_hold(slot, sequence, step, events)

    def _end_or_hold(self, slot: int, sequence: RunningSequence, step: OutputStep, events: Events) -> None:
        """After a token: the request's end, or the copy of a state to which it may rewind."""
        index = len(sequence.sampled)
        if step.stop is not None:
            events += self.finish(sequence, FinishReason.STOP, text=step.text, stop=step.stop)
        elif sequence.is_complete:
            events += self.finish(sequence, FinishReason.STOP)
        elif index == sequence.params.max_tokens:
            events += self.finish(sequence, FinishReason.LENGTH)
        elif sequence.may_rewind:
            if step.holding_since is not None:
                self._runner.rollback_drafts(slot, sequence)  # drafts may lie behind the start of the held text
            sequence.rewind_points.update(
                num_fed=index - 1,  # the token sampled last is not fed yet
                num_read=sequence.num_fed,
                holding_since=step.holding_since,
                copy=lambda: self._runner.pool.copy(slot),
            )

    def finish(
        self,
        sequence: RunningSequence,
        reason: FinishReason,
        *,
        text: str = "",
        stop: StopMatch | None = None,
        error: NsmError | None = None,
    ) -> Events:
        """Ends a request: its last event, and its slot or its position in the queue becomes free."""
        request = sequence.request
        finished = Finished(
            reason=reason,
            text=text + sequence.output.finish(),
            stop_reason=None if stop is None else stop.reason,
            num_dropped_tokens=0 if stop is None else stop.num_dropped,
            tail=b"" if stop is None else stop.tail,
            prompt_tokens=sequence.prompt_tokens,
            cached_tokens=sequence.resumed_position,
            completion_tokens=len(sequence.sampled),
            end_state=self._end_state(sequence, reason, stop),
            error=error,
            timings=sequence.timeline.timings(self._clock()),
            energy=self._stats.take_energy(request.request_id),
            shared_tokens=sequence.num_shared,
        )
        self._scheduler.remove(request.request_id)
        self._active.remove(sequence)
        self._shared.ended(sequence, is_state_good=not isinstance(error, StepFailed))
        return [(request.request_id, finished)]

    def _end_state(self, sequence: RunningSequence, reason: FinishReason, stop: StopMatch | None) -> EndState | None:
        """None if it was not requested, or the request was aborted or failed."""
        slot = sequence.slot
        if not sequence.request.keep_state or slot is None or reason in (FinishReason.ABORT, FinishReason.ERROR):
            return None
        held = self._held if sequence.request.hold_state else None
        return make_end_state(self._runner, sequence, slot, stop, self._tokenizer, held=held)


def _work_of(slots: npt.NDArray[np.int64], ids: npt.NDArray[np.int64]) -> tuple[int, dict[int, int] | None]:
    """ids [rounds, slots]: the number of rounds in which a slot took part, and in how many each did; None where all did
    in all of them.
    """
    took_part = ids != SKIPPED
    num_rounds, num_decoded = max(1, int(took_part.any(axis=1).sum())), took_part.sum(axis=0)
    is_whole = bool((num_decoded == num_rounds).all())
    return num_rounds, None if is_whole else dict(zip(slots.tolist(), num_decoded.tolist(), strict=True))


def _sampled_of(sequence: RunningSequence, token_id: int) -> Sampled:
    """The token that comes next in the sequence, or the error that stands for it."""
    position = sequence.prompt_tokens + len(sequence.sampled)
    return not_finite(position) if token_id == NOT_FINITE else SampledToken(token_id)


def make_end_state(
    runner: Runner,
    sequence: RunningSequence,
    slot: int,
    stop: StopMatch | None,
    tokenizer: Tokenizer,
    *,
    held: HeldStates | None = None,
) -> EndState:
    """The state and the log that agree with the visible text, for a session. `stop`: None if max_tokens ended the turn.

    The state is that of one run over the log's ids, whatever ended the turn: fed tokens of a stop string are rewound,
    and a token that the stop string cut in the middle is replaced by the ids of its visible bytes. May change the state
    in `slot`: this is the turn's last use of it. `held`: where the state stays, instead of leaving as bytes.
    """
    num_sampled = len(sequence.sampled)
    num_whole = num_sampled if stop is None else num_sampled - stop.num_dropped
    tail = tokenizer.encode_bytes(stop.tail) if stop is not None and stop.tail else []
    visible_ids = [*sequence.sampled[:num_whole], *tail]
    if stop is not None:
        runner.rollback_drafts(slot, sequence)  # drafts may lie behind the stop
    point = sequence.rewind_points.latest(num_visible=num_whole) if num_whole < num_sampled - 1 else None
    num_fed = num_sampled - 1 if point is None else point.num_fed  # the token sampled last is never fed
    pending = visible_ids[-1] if len(visible_ids) > num_fed else None
    num_wanted = len(visible_ids) - (pending is not None)
    num_read = sequence.num_fed  # fewer after a rollback of drafts
    earlier: State | None = None
    if point is not None and num_read > min(num_whole, num_wanted):
        num_read, earlier = point.num_read, point.state
    unread = visible_ids[num_read:num_wanted]
    if unread or earlier is not None:
        runner.feed(slot, unread, since=earlier)
    counts = Counter(sequence.resumed_counts)
    counts.update(visible_ids)
    new_ids = (*sequence.request.prompt_ids, *visible_ids)
    return EndState(
        state=b"" if held is not None else runner.pack(slot, is_complete=not unread and earlier is None),
        held=None if held is None else held.hold(slot),
        position=sequence.resumed_position + len(new_ids) - (pending is not None),
        pending=pending,
        new_ids=new_ids,
        generated_counts=dict(counts),
    )
