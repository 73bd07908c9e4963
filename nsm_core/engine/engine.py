"""The engine: owns scheduler, runner and running sequences, and advances them step by step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType

from nsm_core.config import EngineConfig
from nsm_core.energy.meter import EnergyMeter
from nsm_core.engine.accounts import Accounts
from nsm_core.engine.admission import AdmissionCheck
from nsm_core.engine.ahead import Hindrances, LaunchedStep
from nsm_core.engine.end_state import make_end_state
from nsm_core.engine.failures import StepFailures
from nsm_core.engine.live import LiveRequests
from nsm_core.engine.output import StopMatch
from nsm_core.engine.request import (
    EndState,
    Event,
    Finished,
    FinishReason,
    GenerationRequest,
    PromptScored,
    PromptState,
    TokenEvent,
)
from nsm_core.engine.runner import Runner, StepResult
from nsm_core.engine.scheduler import Chunk, Plan, Scheduler
from nsm_core.engine.sequence import RunningSequence
from nsm_core.engine.speculation import Drafts, Speculation
from nsm_core.engine.tiers import EngineTier
from nsm_core.engine.watched import WatchedRequests
from nsm_core.errors import InvalidRequest, NsmError, NumericalError, StepFailed
from nsm_core.execution.base import ExecutorFactory, SequenceModel
from nsm_core.execution.eager import EagerExecutor
from nsm_core.inspection.probe import RoutingProbe
from nsm_core.inspection.routing import TokenRouting
from nsm_core.model.observer import ModelObserver
from nsm_core.sampling.result import NOT_FINITE, SampledToken
from nsm_core.sampling.sampler import not_finite
from nsm_core.stats import EngineStats
from nsm_core.tokenizer import Tokenizer

# Events of one step, each with the id of its request.
Events = list[tuple[str, Event]]


class Engine:
    """Runs requests on one model. Not thread-safe, except for `check`; `AsyncEngine` puts a thread around it.

    `executor`: how the model is computed; `tiers`: its smaller forms, by number of states; `meter`: of the energy that
    requests are charged; `observer`: looks at what the model's states do; `probe`: tells it to the requests that ask,
    without it none may; `clock` gives the seconds that deadlines are compared with; `poison` fills free rows of state
    with NaN.
    """

    def __init__(
        self,
        model: SequenceModel,
        tokenizer: Tokenizer,
        *,
        fingerprint: str,
        config: EngineConfig,
        executor: ExecutorFactory = EagerExecutor,
        tiers: Mapping[int, EngineTier] = MappingProxyType({}),
        meter: EnergyMeter | None = None,
        observer: ModelObserver | None = None,
        probe: RoutingProbe | None = None,
        clock: Callable[[], float] = time.monotonic,
        poison: bool = False,
    ) -> None:
        self.config = config
        self._tokenizer = tokenizer
        self._clock = clock
        self._admission = AdmissionCheck(
            vocab_size=tokenizer.vocab_size,
            spec=model.state_spec,
            fingerprint=fingerprint,
            tiers={size: tier.model.state_spec for size, tier in tiers.items()},
        )
        whole = executor(model, num_rows=config.max_slots, poison=poison)
        self._scheduler = Scheduler(
            max_slots=config.max_slots,
            token_budget=config.token_budget,
            queue_limit=config.queue_limit,
            prompt_unit=whole.prompt_unit,
        )
        smaller = {
            size: tier.executor(tier.model, num_rows=config.max_slots, poison=poison) for size, tier in tiers.items()
        }
        self._whole_pool = whole.pool
        self._runner = Runner(whole, smaller)
        self._live = LiveRequests()
        self._failures = StepFailures()
        self._watched = WatchedRequests(probe, {size: tier.probe for size, tier in tiers.items()}, clock=clock)
        self._speculation = Speculation(config, is_possible=whole.savepoint is not None)
        self._hindrances = Hindrances(is_possible=whole.look_ahead is not None and whole.savepoint is None)
        self._launched: LaunchedStep | None = None  # in flight; one of its requests is not over
        self._settled_at = 0.0  # when the last step that was in flight was over, by the monotonic clock
        counted = EngineStats(max_slots=config.max_slots, state_pool_bytes=self._runner.slots.num_bytes)
        self._accounts = Accounts(counted, meter=meter, observer=observer)

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._live.by_id)

    def check(self, request: GenerationRequest) -> None:
        """Raises InvalidRequest, StateMismatch or SnapshotCorrupt. Any thread may call it."""
        self._admission.check(request)
        if request.include_routing:
            self._watched.check(request)

    def add(self, request: GenerationRequest, *, arrival: float | None = None) -> None:
        """Queue a request that came at `arrival` by the clock, or now. Raises what `check` raises, or Overloaded.

        Whatever it raises, nothing of the request stays here.
        """
        self.check(request)
        if request.request_id in self._live.by_id:
            raise InvalidRequest(f"request id {request.request_id} is in use", param="request_id")
        sequence = RunningSequence(request, self._tokenizer, self._clock() if arrival is None else arrival)
        self._scheduler.add(request.request_id, prompt_len=len(sequence.read_ids), borders=request.keep_states_at)
        self._live.add(sequence)

    def cancel(self, request_id: str) -> None:
        """The request ends with `abort` before the next step; one that is over already is left alone."""
        self._live.cancel(request_id)

    def abort_all(self) -> Events:
        """End every request now."""
        self._live.cancel_all()
        return self._end_early()

    def step(self) -> Events:
        """Advance every scheduled request once; return what became visible.

        Where the executor can look ahead the next step is in flight then. What goes wrong in a step ends the requests
        that were in it; raises only where the engine cannot go on.
        """
        events = self._end_early()
        launched, self._launched = self._launched, None
        plan = self._plan(launched)
        if launched is None and plan.is_empty:
            self._accounts.rest()
            return events
        started = time.monotonic()
        if launched is not None or self._hindrances.allow(plan, self._live.by_id):
            self._step_ahead(launched, plan, events)
        else:
            self._step_alone(plan, events)
        if not self._live.by_id:
            self._accounts.rest()
        self._accounts.counted.step_seconds += time.monotonic() - started
        return events

    def stats(self) -> EngineStats:
        """A copy of the counters."""
        stats = self._accounts.stats()
        stats.num_running, stats.num_waiting = self._scheduler.num_running, self._scheduler.num_waiting
        return stats

    def _end_early(self) -> Events:
        """Between steps: what was cancelled, and whose deadline passed."""
        events: Events = []
        for sequence, error in self._live.take_ended(self._clock()):
            self._charge_in_flight(sequence)
            events += self._finish(sequence, FinishReason.ABORT if error is None else FinishReason.ERROR, error=error)
        if self._launched is not None and not self._launched.has_any(self._live.running):
            self._launched = None
        return events

    def _charge_in_flight(self, sequence: RunningSequence) -> None:
        """For its part in the step in flight, whose result it will not see."""
        launched, slot = self._launched, sequence.slot
        if launched is not None and slot is not None and launched.sequences.get(slot) is sequence:
            seconds = time.monotonic() - max(launched.launched_at, self._settled_at)
            self._accounts.charge_share(launched.plan, slot, sequence.request.request_id, seconds)

    def _plan(self, launched: LaunchedStep | None) -> Plan:
        """What to do next, behind the step in flight if there is one."""
        plan = self._watched.put_off(self._scheduler.plan(), self._live.by_id)
        return plan if launched is None else launched.behind(plan)

    def _step_alone(self, plan: Plan, events: Events) -> None:
        """A step that is waited for before anything else is done."""
        try:
            self._advance(plan, events)
            self._failures.forget()
        except Exception as error:
            self._fail(self._live.of(plan), self._failures.take(error), events)

    def _step_ahead(self, launched: LaunchedStep | None, plan: Plan, events: Events) -> None:
        """What the step in flight gave, once that of `plan` is launched behind it. Without one in flight, that of
        `plan` is it, and the one after it is launched behind it.
        """
        if launched is None:
            try:
                launched = self._launch(plan, None)
            except Exception as error:
                self._fail(self._live.of(plan), self._failures.take(error), events)
                return
            plan = self._plan(launched)
        following: LaunchedStep | None = None
        failure: Exception | None = None
        if not plan.is_empty and not self._accounts.is_look_due and self._hindrances.allow(plan, self._live.by_id):
            try:
                following = self._launch(plan, launched)
            except Exception as error:  # no reason to lose what is in flight
                failure = error
        self._settle(launched, following, events)
        if failure is not None:
            self._fail(self._live.of(plan), self._failures.take(failure), events)
        elif following is not None and following.has_any(self._live.running):
            self._launched = following

    def _launch(self, plan: Plan, before: LaunchedStep | None) -> LaunchedStep:
        self._open(plan)
        self._accounts.begin(plan, self._live.running, self._whole_pool, may_look=before is None)
        launched = self._runner.launch(plan, self._live.running, before)
        self._scheduler.apply(plan)
        return launched

    def _settle(self, launched: LaunchedStep, following: LaunchedStep | None, events: Events) -> None:
        """Waits for the step in flight and applies it. One that fails takes the step behind it along."""
        try:
            ids = launched.wait()
        except Exception as error:
            behind = [] if following is None else following.sequences.values()
            self._fail([*launched.sequences.values(), *behind], self._failures.take(error), events)
            return
        try:
            self._apply_launched(launched, ids, events)
            self._failures.forget()
        except Exception as error:
            self._fail(launched.sequences.values(), self._failures.take(error), events)

    def _advance(self, plan: Plan, events: Events) -> None:
        """Runs the plan. What became visible is in `events`, also where this raises in the middle."""
        self._open(plan)
        self._accounts.begin(plan, self._live.running, self._whole_pool)
        started = time.monotonic()
        routing = self._watched.look(plan, self._live.running, self._runner.slots)
        drafts = self._speculation.propose(plan, self._live.running)
        result = self._runner.run(plan, self._live.running, drafts)
        self._accounts.charge(plan, self._live.running, time.monotonic() - started, result.num_read)
        self._scheduler.apply(plan)
        self._apply(plan, result, routing, events, drafts)

    def _fail(self, sequences: Iterable[RunningSequence], error: StepFailed, events: Events) -> None:
        """Ends those that have not ended yet. Their states may be anything: none is kept."""
        self._accounts.counted.num_failed_steps += 1
        for sequence in sequences:
            if self._live.has(sequence):
                events += self._finish(sequence, FinishReason.ERROR, error=error)

    def _open(self, plan: Plan) -> None:
        now = self._clock()
        for admission in plan.admitted:
            sequence = self._live.by_id[admission.request_id]
            sequence.timeline.admitted = now
            self._runner.open(admission.slot, sequence.request.resume, sequence.request.num_states)
            self._live.open(admission.slot, sequence)
            self._watched.add(admission.slot, sequence)
            if self._runner.may_be_drafted(admission.slot):
                self._speculation.add(admission.slot, sequence)
            self._hindrances.add(admission.slot, sequence)
            self._accounts.counted.tokens_resumed += sequence.resumed_position

    def _apply(
        self, plan: Plan, result: StepResult, routing: Mapping[int, TokenRouting], events: Events, drafts: Drafts
    ) -> None:
        for slot, scores in result.scored.items():
            self._live.running[slot].prompt_scores += scores
        for chunk in plan.prefill:
            self._keep_prompt_state(chunk)
        for slot, sampled in result.sampled.items():
            if slot in drafts:
                self._take_accepted(slot, [sampled, *result.further[slot]], len(drafts[slot]), events)
            else:
                self._take_or_fail(slot, sampled, routing.get(slot), events)
        self._hindrances.look_again(self._live.running)

    def _apply_launched(self, launched: LaunchedStep, ids: Sequence[int], events: Events) -> None:
        now = time.monotonic()
        seconds, self._settled_at = now - max(launched.launched_at, self._settled_at), now
        self._accounts.charge(launched.plan_of(self._live.running), self._live.running, seconds, {})
        for slot, token_id in zip(launched.slots, ids, strict=True):
            sequence = launched.sequences[slot]
            sequence.num_in_flight -= 1
            if self._live.running.get(slot) is not sequence:  # over; the slot may be another's
                continue
            if not self._take_plain(sequence, token_id, events):
                is_good = token_id != NOT_FINITE
                position = sequence.prompt_tokens + len(sequence.sampled)
                self._take_or_fail(slot, SampledToken(token_id) if is_good else not_finite(position), None, events)

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
            events += self._finish(self._live.running[slot], FinishReason.ERROR, error=sampled)

    def _keep_prompt_state(self, chunk: Chunk) -> None:
        sequence = self._live.running[chunk.slot]
        num_read = chunk.start + chunk.length
        if num_read in sequence.request.keep_states_at:
            position = sequence.resumed_position + num_read
            state = self._runner.slots.pool(chunk.slot).pack(chunk.slot)
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
            events += self._finish(sequence, FinishReason.STOP, text=step.text, stop=step.stop)
        elif index == request.sampling.max_tokens:
            events += self._finish(sequence, FinishReason.LENGTH)
        elif sequence.may_be_taken_back:
            if step.holding_since is not None:
                self._runner.take_back(slot, sequence)  # drafts may have been read past where the held text begins
            sequence.rewind_points.update(
                num_fed=index - 1,  # the token sampled last is not fed yet
                num_read=sequence.num_fed,
                holding_since=step.holding_since,
                copy=lambda: self._runner.slots.pool(slot).copy(slot),
            )

    def _finish(
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
