"""The engine: owns scheduler, runner and running sequences, and advances them step by step."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import torch

from nsm_core.config import EngineConfig
from nsm_core.energy.meter import EnergyMeter
from nsm_core.engine.active_requests import ActiveRequests
from nsm_core.engine.apply import Events as Events
from nsm_core.engine.apply import ResultApplier
from nsm_core.engine.held_states import HeldStart, HeldStates
from nsm_core.engine.overlap import InFlightStep, OverlapBlockers
from nsm_core.engine.request import FinishReason, GenerationRequest
from nsm_core.engine.request_check import RequestCheck
from nsm_core.engine.rest import PREPARE_AFTER_S, Rest
from nsm_core.engine.routing_watch import RoutingWatch
from nsm_core.engine.runner import Runner
from nsm_core.engine.scheduler import Plan, Scheduler
from nsm_core.engine.sequence import RunningSequence
from nsm_core.engine.shared_prompts import SharedPrompts
from nsm_core.engine.slices import DecodeSlices
from nsm_core.engine.slow_steps import SlowSteps
from nsm_core.engine.speculation import Speculation
from nsm_core.engine.step_stats import StepStats
from nsm_core.engine.token_rows import TokenBatch, TokenRows
from nsm_core.engine.token_text import TokenText
from nsm_core.errors import EngineDead, InvalidRequest, StepFailed
from nsm_core.execution.base import ExecutorFactory, PrepareMore, SequenceModel
from nsm_core.execution.eager import EagerExecutor
from nsm_core.grammars.compiler import GrammarCompiler
from nsm_core.grammars.matcher import TokenMatcher
from nsm_core.inspection.probe import RoutingProbe
from nsm_core.model.observer import ModelObserver
from nsm_core.stats import EngineStats
from nsm_core.tokenizer import Tokenizer

logger = logging.getLogger("nsm.engine")

# After so many failures without a success the fault is the engine's: the requests were others each time.
MAX_FAILURES_IN_A_ROW = 5
# Error texts of an accelerator's libraries after its context is lost; every later call would fail as well.
LOST_DEVICE = ("CUDA error", "Triton Error [CUDA]", "CUBLAS_STATUS_", "CUDNN_STATUS_", "device-side assert")


class Engine:
    """Runs requests on one model. Not thread-safe, except for `check`; `AsyncEngine` puts a thread around it.

    `executor`: how the model is computed. `meter`: measures the energy that requests are charged. `observer`: samples
    the use of the model's states. `probe`: captures routing for the requests that ask for it; without one they are
    refused. `clock`: the seconds that deadlines are compared with. `poison`: free rows of state are filled with NaN.
    """

    def __init__(
        self,
        model: SequenceModel,
        tokenizer: Tokenizer,
        *,
        fingerprint: str,
        config: EngineConfig,
        executor: ExecutorFactory = EagerExecutor,
        meter: EnergyMeter | None = None,
        observer: ModelObserver | None = None,
        probe: RoutingProbe | None = None,
        clock: Callable[[], float] = time.monotonic,
        poison: bool = False,
    ) -> None:
        self.config = config
        self._tokenizer = tokenizer
        self._clock = clock
        self.grammars = GrammarCompiler(tokenizer)
        self._request_check = RequestCheck(
            vocab_size=tokenizer.vocab_size, spec=model.state_spec, fingerprint=fingerprint
        )
        made = executor(model, num_rows=config.max_slots, poison=poison)
        # With savepoints any cut of a text gives the same bits: see Executor.savepoint
        self.replays_exactly = made.savepoint is not None
        # Others give a log the same bits if what was sampled is read as it was sampled: see `sampled_at`
        self.replays_singly = made.savepoint is None and made.prompt_unit > 1
        self._scheduler = Scheduler(
            max_slots=config.max_slots,
            token_budget=config.token_budget,
            queue_limit=config.queue_limit,
            prompt_unit=made.prompt_unit,
            prompt_tokens_beside=config.prompt_tokens_beside,
            reads_ragged=made.reads_ragged,
        )
        overlap = made.overlap if made.savepoint is None else None
        self.may_overlap = overlap is not None  # only then are there plain tokens for `take_tokens`
        self._token_rows = TokenRows(config.max_slots, tokenizer.vocab_size)
        self._runner = Runner(made, self._token_rows)
        self.held = HeldStates(made.pool, max_bytes=config.held_state_bytes)
        self._shared = SharedPrompts(self._scheduler, copy=self._runner.pool.copy, prompt_unit=made.prompt_unit)
        self._failures = StepFailures()
        self._slow_steps = SlowSteps()
        self._rest = Rest(self._runner.pool, clock)
        self._prepare_more = made.prepare_more
        self._routing = RoutingWatch(probe, clock=clock)
        self._speculation = Speculation(config, is_possible=made.savepoint is not None)
        self._slices = DecodeSlices(is_possible=made.decode_rounds is not None)
        self.interrupt = self._slices.interrupt  # set by whoever has something for the engine while it is in a step
        self._blockers = OverlapBlockers(overlap, self._token_rows)
        listeners = (self._runner, self._routing, self._speculation, self._blockers, self._slices)
        self._active = ActiveRequests(listeners if overlap is None else (*listeners, self._token_rows))
        self._in_flight: InFlightStep | None = None  # one of its requests is active
        counters = EngineStats(max_slots=config.max_slots, state_pool_bytes=self._runner.pool.num_bytes)
        self._stats = StepStats(counters, meter=meter, observer=observer)
        self._applier = ResultApplier(
            active=self._active,
            scheduler=self._scheduler,
            shared=self._shared,
            runner=self._runner,
            stats=self._stats,
            speculation=self._speculation,
            blockers=self._blockers,
            token_rows=self._token_rows,
            tokenizer=tokenizer,
            held=self.held,
            clock=clock,
        )

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._active.by_id)

    def text_of(self, request: GenerationRequest) -> TokenText:
        """Makes the text of a request with a tag."""
        return TokenText(self._tokenizer, request)

    def check(self, request: GenerationRequest) -> None:
        """Raises InvalidRequest, StateMismatch or SnapshotCorrupt. Any thread may call it."""
        self._request_check.check(request)
        if request.include_routing:
            self._routing.check()

    def add(
        self,
        request: GenerationRequest,
        *,
        arrival: float | None = None,
        matcher: TokenMatcher | None = None,
        tag: int | None = None,
        is_checked: bool = False,
    ) -> None:
        """Queues a request that arrived at `arrival` by the clock, or now. Raises as `check`, or Overloaded.
        `is_checked`: `check` has passed it, which reads the whole prompt.

        `matcher`: of its grammar, which is compiled here if it is not given: that may take seconds. `tag`, at least 0
        and unique: the reader makes the text if the request `has_free_text`, so events have none, and most tokens come
        with `take_tokens` instead.

        After an error nothing of the request remains here.
        """
        if not is_checked:
            self.check(request)
        if request.request_id in self._active.by_id:
            raise InvalidRequest(f"request id {request.request_id} is in use", param="request_id")
        grammar = request.sampling.grammar
        if grammar is not None and matcher is None:
            matcher = self.grammars.matcher(grammar)
        sequence = RunningSequence(
            request, self._tokenizer, self._clock() if arrival is None else arrival, matcher, tag
        )
        sequence.held_start = self._held_start(request)
        self._shared.queue(sequence)
        self._active.add(sequence)
        self._rest.used()

    def _held_start(self, request: GenerationRequest) -> HeldStart | None:
        """Raises EngineDead if the state is not here: of an engine that has ended, or it had to go."""
        if request.resume is None or request.resume.held is None:
            return None
        state = self.held.take(request.resume.held)
        if state is None:
            raise EngineDead("the engine does not hold the state any more that the request starts from: try again")
        return state

    def cancel(self, request_id: str) -> None:
        """The request ends with `abort` before the next step; an unknown id is ignored."""
        self._active.cancel(request_id)

    def abort_all(self) -> Events:
        """Ends every request now."""
        self._active.cancel_all()
        return self._end_early()

    def step(self) -> Events:
        """Advances every scheduled request once and returns the new events.

        If steps overlap, the next step is in flight when this returns. An error in a step ends the requests that were
        in it; this raises only if the engine cannot continue.
        """
        events = self._end_early()
        in_flight, self._in_flight = self._in_flight, None
        plan = self._plan(in_flight)
        if in_flight is None and plan.is_empty:
            self._stats.idle()
            return events
        started = time.monotonic()
        if in_flight is not None or self._blockers.allow(plan, self._active.by_id):
            self._step_overlapped(in_flight, plan, events)
        else:
            self._step_alone(plan, events)
        self._flush_held()
        if not self._active.by_id:
            self._stats.idle()
        seconds = time.monotonic() - started
        self._stats.counters.step_seconds += seconds
        self._slow_steps.record(seconds)
        self._stats.counters.num_slow_steps = self._slow_steps.total
        return events

    def take_tokens(self) -> list[TokenBatch]:
        """Plain tokens of tagged requests since the last call; they come before the events of the last step."""
        return self._applier.take_tokens()

    def rest_due_s(self, most: float) -> float:
        """Seconds after which `rest` should be called again without requests, up to `most`: it has more to prepare."""
        return most if self._prepare_more is None else min(most, max(0.0, PREPARE_AFTER_S - self._rest.idle_s))

    def rest(self) -> None:
        """After each turn of whoever steps. An engine that has been idle for a moment prepares what its start has left,
        a part at a time; one that has been idle for a while gives memory back.
        """
        self._rest.turn(has_work=self.has_work or self._in_flight is not None)
        if self._prepare_more is not None and self._rest.idle_s >= PREPARE_AFTER_S:
            self._prepare_next(self._prepare_more)

    def _prepare_next(self, prepare_more: PrepareMore) -> None:
        """What cannot be prepared now is left to its first use, whose requests will meet the error."""
        try:
            if not prepare_more():
                self._prepare_more = None
        except Exception as error:
            if is_device_lost(error):
                raise
            self._prepare_more = None
            logger.warning("the engine prepares nothing more ahead: %s: %s", type(error).__name__, error)

    def stats(self) -> EngineStats:
        """A copy of the counters."""
        stats = self._stats.snapshot()
        stats.num_running, stats.num_waiting = self._scheduler.num_running, self._scheduler.num_waiting
        return stats

    def _end_early(self) -> Events:
        """Between steps: ends cancelled requests and those whose deadline has passed."""
        events: Events = []
        for sequence, error in self._active.pop_ended(self._clock()):
            self._record_in_flight_share(sequence)
            events += self._applier.finish(
                sequence, FinishReason.ABORT if error is None else FinishReason.ERROR, error=error
            )
        if self._in_flight is not None and not self._in_flight.has_any(self._active.running):
            self._in_flight = None
        return events

    def _record_in_flight_share(self, sequence: RunningSequence) -> None:
        """Charges a request that ends early for its part in the step in flight."""
        step, slot = self._in_flight, sequence.slot
        if step is not None and slot is not None and step.has(slot, sequence):
            seconds = self._applier.seconds_of(step)
            self._stats.record_share(step.plan, slot, sequence.request.request_id, seconds)

    def _plan(self, in_flight: InFlightStep | None) -> Plan:
        """The next step, after the one in flight if there is one."""
        plan = self._routing.defer(self._scheduler.plan(), self._active.by_id)
        if in_flight is None:
            return plan
        plan = in_flight.without_ending(plan)
        return self._blockers.defer_prompts(plan, self._active.by_id) if in_flight.plan.prefill else plan

    def _step_alone(self, plan: Plan, events: Events) -> None:
        """Runs a step and waits for it."""
        try:
            self._advance(plan, events)
            self._failures.reset()
        except Exception as error:
            self._applier.fail(self._active.in_plan(plan), self._failures.to_step_failed(error), events)

    def _step_overlapped(self, in_flight: InFlightStep | None, plan: Plan, events: Events) -> None:
        """Launches the step of `plan`, then applies the step in flight. Without one in flight, the step of `plan` takes
        its part, and the step after it is launched too.
        """
        if in_flight is None:
            try:
                in_flight = self._launch(plan, None)
            except Exception as error:
                self._applier.fail(self._active.in_plan(plan), self._failures.to_step_failed(error), events)
                return
            plan = self._plan(in_flight)
        following: InFlightStep | None = None
        failure: Exception | None = None
        if not plan.is_empty and not self._stats.is_sample_due and self._blockers.allow(plan, self._active.by_id):
            try:
                following = self._launch(plan, in_flight)
            except Exception as error:  # the step in flight is still valid
                failure = error
        self._complete(in_flight, following, events)
        if failure is not None:
            self._applier.fail(self._active.in_plan(plan), self._failures.to_step_failed(failure), events)
        elif following is not None and following.has_any(self._active.running):
            self._in_flight = following

    def _launch(self, plan: Plan, before: InFlightStep | None) -> InFlightStep:
        self._start_admitted(plan)
        self._stats.begin(plan, self._active.running, self._runner.pool, may_sample=before is None)
        num_rounds = self._blockers.num_rounds(plan)
        if num_rounds:
            step = self._runner.launch_rounds(plan, self._active.running, before, num_rounds)
        else:
            step = self._runner.launch(plan, self._active.running, before)
        self._shared.took_part(plan, self._active.running)
        self._scheduler.apply(plan)
        return step

    def _complete(self, step: InFlightStep, following: InFlightStep | None, events: Events) -> None:
        """Waits for the step in flight and applies it. If it fails, the following step fails with it."""
        try:
            ids = step.wait()
        except Exception as error:
            behind = [] if following is None else following.sequences.values()
            self._applier.fail([*step.sequences.values(), *behind], self._failures.to_step_failed(error), events)
            return
        try:
            self._applier.apply_in_flight(step, ids, following, events)
            self._failures.reset()
        except Exception as error:
            self._applier.fail(step.sequences.values(), self._failures.to_step_failed(error), events)

    def _advance(self, plan: Plan, events: Events) -> None:
        """Runs the plan. If this raises, `events` holds what became visible before."""
        self._start_admitted(plan)
        self._stats.begin(plan, self._active.running, self._runner.pool)
        started = time.monotonic()
        routing = self._routing.capture(plan, self._active.running, self._runner.pool)
        drafts = self._speculation.propose(plan, self._active.running)
        most_rounds = 0 if drafts else self._most_rounds(plan)
        if most_rounds:
            self._decode_slice(plan, most_rounds, started, events)
            return
        result = self._runner.run(plan, self._active.running, drafts)
        self._stats.record(plan, self._active.running, time.monotonic() - started, result.num_read)
        self._shared.took_part(plan, self._active.running)
        self._scheduler.apply(plan)
        self._applier.apply(plan, result, routing, events, drafts)

    def _most_rounds(self, plan: Plan) -> int:
        """Tokens of each row that one call may decode; 0: none, it must be a plain step."""
        if self._runner.has_unread_text:
            return 0
        return min(self._slices.most_rounds(plan, self._active.running), self._speculation.most_rounds(plan))

    def _decode_slice(self, plan: Plan, most_rounds: int, started: float, events: Events) -> None:
        running = self._active.running
        tokens = self._runner.decode(plan.decode, self._slices.inputs(plan, running, most_rounds))
        self._stats.record(plan, running, time.monotonic() - started, {}, num_rounds=len(tokens))
        self._scheduler.apply(plan)
        self._applier.apply_slice(plan.decode, tokens, events)

    def _flush_held(self) -> None:
        """Copies the states that requests left in this step. After an error those states are gone, as if others had
        taken their place; the requests have their text, and the rows of those that run are as they were.
        """
        try:
            self.held.flush()
        except Exception as error:
            if is_device_lost(error):
                raise
            logger.error("states that requests left with the engine could not be copied, they are gone", exc_info=error)

    def _start_admitted(self, plan: Plan) -> None:
        now = self._clock()
        for assignment in plan.admitted:
            sequence = self._active.by_id[assignment.request_id]
            sequence.timeline.admitted = now
            self._active.start(assignment.slot, sequence)
            self._stats.counters.tokens_resumed += sequence.resumed_position
        self._runner.start_fresh()
        self.held.flush()


class StepFailures:
    """Counts failed steps, and decides whether a failure ends the requests of a step or the engine."""

    def __init__(self) -> None:
        self._num_in_a_row = 0

    def reset(self) -> None:
        """A step succeeded."""
        self._num_in_a_row = 0

    def to_step_failed(self, error: Exception) -> StepFailed:
        """The error for the requests of a step that raised `error`. Raises `error` itself if the engine must end."""
        self._num_in_a_row += 1
        if is_device_lost(error) or self._num_in_a_row >= MAX_FAILURES_IN_A_ROW:
            raise error
        logger.error("a step of the engine failed, its requests end", exc_info=error)
        return StepFailed(f"a step of the engine failed with this request in it: {type(error).__name__}")


def is_device_lost(error: Exception) -> bool:
    """Whether the error says that an accelerator or its context is broken; running out of memory does not."""
    if isinstance(error, torch.OutOfMemoryError):
        return False
    return isinstance(error, torch.AcceleratorError) or any(text in str(error) for text in LOST_DEVICE)
