"""What steps gave, applied to their requests: events, and ends. The only place where a request ends."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from nsm_core.engine.active_requests import LiveRequests
from nsm_core.engine.output import StopMatch
from nsm_core.engine.overlap import Hindrances, LaunchedStep
from nsm_core.engine.request import EndState, Event, Finished, FinishReason, PromptScored, PromptState, TokenEvent
from nsm_core.engine.routing_watch import WatchedRequests
from nsm_core.engine.runner import Runner, StepResult
from nsm_core.engine.scheduler import Chunk, Plan, Scheduler
from nsm_core.engine.sequence import RunningSequence
from nsm_core.engine.speculation import Drafts, Speculation
from nsm_core.engine.step_stats import Accounts
from nsm_core.errors import NsmError, NumericalError, StepFailed
from nsm_core.inspection.routing import TokenRouting
from nsm_core.sampling.result import NOT_FINITE, SampledToken
from nsm_core.sampling.sampler import not_finite
from nsm_core.state.spec import State
from nsm_core.tokenizer import Tokenizer


def make_end_state(
    runner: Runner, sequence: RunningSequence, slot: int, stop: StopMatch | None, tokenizer: Tokenizer
) -> EndState:
    """`stop` is None when max_tokens ended the turn. May change the state in `slot`: it is the turn's last use of it.

    The state is that of one run over the log's ids, whatever ended the turn: tokens of a stop string that were fed are
    taken back, and a token that the stop string cut in the middle is replaced by the ids of its visible bytes.
    """
    num_sampled = len(sequence.sampled)
    num_whole = num_sampled if stop is None else num_sampled - stop.num_dropped
    tail = tokenizer.encode_bytes(stop.tail) if stop is not None and stop.tail else []
    kept = [*sequence.sampled[:num_whole], *tail]
    if stop is not None:
        runner.take_back(slot, sequence)  # drafts may have been read past the stop
    point = sequence.rewind_points.latest(num_kept=num_whole) if num_whole < num_sampled - 1 else None
    num_fed = num_sampled - 1 if point is None else point.num_fed  # the token sampled last is never fed
    pending = kept[-1] if len(kept) > num_fed else None
    num_wanted = len(kept) - (pending is not None)
    num_read = sequence.num_fed  # fewer where drafts were taken back
    earlier: State | None = None
    if point is not None and num_read > min(num_whole, num_wanted):
        num_read, earlier = point.num_read, point.state
    unread = kept[num_read:num_wanted]
    runner.feed(slot, unread, since=earlier)
    new_ids = (*sequence.request.prompt_ids, *kept)
    return EndState(
        state=runner.pack(slot, is_at_rest=not unread and earlier is None),
        position=sequence.resumed_position + len(new_ids) - (pending is not None),
        pending=pending,
        new_ids=new_ids,
        generated_counts=dict(Counter(sequence.resumed_counts) + Counter(kept)),
    )


# Events of one step, each with the id of its request.
Events = list[tuple[str, Event]]


class Outcomes:
    """Of one engine, whose parts it is given: all that know of a request are told when it is over."""

    def __init__(
        self,
        *,
        live: LiveRequests,
        scheduler: Scheduler,
        runner: Runner,
        accounts: Accounts,
        watched: WatchedRequests,
        speculation: Speculation,
        hindrances: Hindrances,
        tokenizer: Tokenizer,
        clock: Callable[[], float],
    ) -> None:
        self._live, self._scheduler, self._runner, self._accounts = live, scheduler, runner, accounts
        self._watched, self._speculation, self._hindrances = watched, speculation, hindrances
        self._tokenizer, self._clock = tokenizer, clock
        self._settled_at = 0.0  # when the last step that was in flight was over, by the monotonic clock

    def seconds_of(self, launched: LaunchedStep) -> float:
        """What a step in flight has taken so far: it began when the one before it was over."""
        return time.monotonic() - max(launched.launched_at, self._settled_at)

    def apply(
        self, plan: Plan, result: StepResult, routing: Mapping[int, TokenRouting], events: Events, drafts: Drafts
    ) -> None:
        for slot, scores in result.scored.items():
            self._live.running[slot].prompt_scores += scores
        for chunk in plan.prefill:
            if chunk.start + chunk.length in self._live.running[chunk.slot].request.keep_states_at:
                # a step that sampled nothing was not waited for
                self._keep_prompt_state(chunk, self._runner.pack(chunk.slot, is_at_rest=False))
        for slot, sampled in result.sampled.items():
            if slot in drafts:
                self._take_accepted(slot, [sampled, *result.further[slot]], len(drafts[slot]), events)
            else:
                self._take_or_fail(slot, sampled, routing.get(slot), events)
        self._hindrances.look_again(self._live.running)

    def apply_launched(
        self, launched: LaunchedStep, ids: Sequence[int], following: LaunchedStep | None, events: Events
    ) -> None:
        """`ids` of a step that was in flight; `following` still is."""
        seconds, self._settled_at = self.seconds_of(launched), time.monotonic()
        self._accounts.charge(launched.plan_of(self._live.running), self._live.running, seconds, {})
        for chunk in launched.plan.prefill if launched.kept else ():
            if chunk.slot in launched.kept and self._live.running.get(chunk.slot) is launched.sequences[chunk.slot]:
                self._keep_prompt_state(chunk, self._runner.pack_kept(launched.kept[chunk.slot]))
        for slot, token_id in zip(launched.slots, ids, strict=True):
            sequence = launched.sequences[slot]
            if self._live.running.get(slot) is not sequence or slot in launched.paused:
                continue  # over, and the slot may be another's; or it was left out
            sequence.num_in_flight -= 1
            if not self._take_plain(sequence, token_id, events):
                self._take_launched(slot, token_id, following, events)

    def _take_launched(self, slot: int, token_id: int, following: LaunchedStep | None, events: Events) -> None:
        sequence = self._live.running[slot]
        position = sequence.prompt_tokens + len(sequence.sampled)
        sampled = not_finite(position) if token_id == NOT_FINITE else SampledToken(token_id)
        self._take_or_fail(slot, sampled, None, events)
        if sequence.may_be_taken_back and self._live.has(sequence):
            if following is not None and token_id in sequence.pausing_ids:
                following.pause(slot, sequence)
            self._hindrances.add(slot, sequence)

    def fail(self, sequences: Iterable[RunningSequence], error: StepFailed, events: Events) -> None:
        """Ends those that have not ended yet. Their states may be anything: none is kept."""
        self._accounts.counted.num_failed_steps += 1
        for sequence in sequences:
            if self._live.has(sequence):
                events += self.finish(sequence, FinishReason.ERROR, error=error)

    def _take_accepted(
        self, slot: int, sampled: Sequence[SampledToken | NumericalError], num_drafted: int, events: Events
    ) -> None:
        """What came before the first draft and after each that was accepted. What ends the request is the last."""
        sequence = self._live.running[slot]
        num_before = len(sequence.sampled)
        for token in sampled:
            self._take_or_fail(slot, token, None, events)
            if slot not in self._live.running:
                break
        num_accepted = min(len(sequence.sampled) - num_before, len(sampled) - 1)
        self._accounts.count_drafts(num_drafted=num_drafted, num_accepted=num_accepted)
        self._speculation.tell(slot, num_drafted=num_drafted, num_accepted=num_accepted)

    def _take_or_fail(
        self, slot: int, sampled: SampledToken | NumericalError, routing: TokenRouting | None, events: Events
    ) -> None:
        if isinstance(sampled, SampledToken):
            self._take(slot, sampled, routing, events)
        else:
            events += self.finish(self._live.running[slot], FinishReason.ERROR, error=sampled)

    def _keep_prompt_state(self, chunk: Chunk, state: bytes) -> None:
        sequence = self._live.running[chunk.slot]
        position = sequence.resumed_position + chunk.start + chunk.length
        sequence.prompt_states.append(PromptState(position=position, state=state))

    def _take_plain(self, sequence: RunningSequence, token_id: int, events: Events) -> bool:
        """One more token of a request that does nothing but show text, as most do; whether it was such a one."""
        text = sequence.take_plain(token_id)
        if text is None:
            return False
        self._accounts.counted.tokens_generated += 1
        token = TokenEvent(index=len(sequence.sampled), token_id=token_id, text=text)
        events.append((sequence.request.request_id, token))
        return True

    def _take(self, slot: int, sampled: SampledToken, routing: TokenRouting | None, events: Events) -> None:
        """One more token of a request, and its end if that was the last."""
        sequence = self._live.running[slot]
        request = sequence.request
        if sampled.logprob is None and routing is None and self._take_plain(sequence, sampled.token_id, events):
            return
        self._accounts.counted.tokens_generated += 1
        if sequence.timeline.first_token is None:
            sequence.timeline.first_token = self._clock()
        if request.prompt_logprobs is not None and not sequence.sampled:
            events.append((request.request_id, PromptScored(logprobs=(None, *sequence.prompt_scores))))
        if sequence.prompt_states:
            events += [(request.request_id, kept) for kept in sequence.take_prompt_states()]
        given_id = sequence.given_id if request.sampled_ids else None
        step = sequence.take(sampled.token_id if given_id is None else given_id)
        index = len(sequence.sampled)
        if given_id is None:
            # The token that stops is not visible itself: what it released comes with Finished
            text = step.text if step.stop is None else ""
            token = TokenEvent(
                index=index, token_id=sampled.token_id, text=text, logprob=sampled.logprob, routing=routing
            )
            events.append((request.request_id, token))
        if step.stop is not None:
            events += self.finish(sequence, FinishReason.STOP, text=step.text, stop=step.stop)
        elif index == request.sampling.max_tokens:
            events += self.finish(sequence, FinishReason.LENGTH)
        elif sequence.may_be_taken_back:
            if step.holding_since is not None:
                self._runner.take_back(slot, sequence)  # drafts may have been read past where the held text begins
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
        """The only way a request ends: its last event, its slot or its place in the queue free again."""
        request = sequence.request
        finished = Finished(
            reason=reason,
            text=text + sequence.output.finish(),
            stop_reason=None if stop is None else stop.reason,
            num_dropped_tokens=0 if stop is None else stop.num_dropped,
            prompt_tokens=sequence.prompt_tokens,
            cached_tokens=sequence.resumed_position,
            completion_tokens=len(sequence.sampled),
            end_state=self._end_state(sequence, reason, stop),
            error=error,
            timings=sequence.timeline.timings(self._clock()),
            energy=self._accounts.close(request.request_id),
        )
        self._scheduler.remove(request.request_id)
        self._live.remove(sequence)
        if sequence.slot is not None:
            self._watched.remove(sequence.slot)
            self._speculation.remove(sequence.slot)
            self._hindrances.remove(sequence.slot)
            self._runner.close(sequence.slot)
        return [(request.request_id, finished)]

    def _end_state(self, sequence: RunningSequence, reason: FinishReason, stop: StopMatch | None) -> EndState | None:
        """None where nothing is kept: not asked for, aborted or failed."""
        slot = sequence.slot
        if not sequence.request.keep_state or slot is None or reason in (FinishReason.ABORT, FinishReason.ERROR):
            return None
        return make_end_state(self._runner, sequence, slot, stop, self._tokenizer)
