"""The engine: owns scheduler, runner and running sequences, and advances them step by step."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import torch

from nsm_core.config import EngineConfig
from nsm_core.energy.meter import EnergyMeter
from nsm_core.engine.active_requests import LiveRequests
from nsm_core.engine.apply import Events as Events
from nsm_core.engine.apply import Outcomes
from nsm_core.engine.overlap import Hindrances, LaunchedStep
from nsm_core.engine.request import FinishReason, GenerationRequest
from nsm_core.engine.request_check import AdmissionCheck
from nsm_core.engine.routing_watch import WatchedRequests
from nsm_core.engine.runner import Runner
from nsm_core.engine.scheduler import Plan, Scheduler
from nsm_core.engine.sequence import RunningSequence
from nsm_core.engine.speculation import Speculation
from nsm_core.engine.step_stats import Accounts
from nsm_core.errors import InvalidRequest, StepFailed
from nsm_core.execution.base import ExecutorFactory, SequenceModel
from nsm_core.execution.eager import EagerExecutor
from nsm_core.inspection.probe import RoutingProbe
from nsm_core.model.observer import ModelObserver
from nsm_core.stats import EngineStats
from nsm_core.tokenizer import Tokenizer

logger = logging.getLogger("nsm.engine")

# No step has succeeded between them: it is not the requests, which were others each time.
MAX_FAILURES_IN_A_ROW = 5
# What the libraries of an accelerator say when its context is lost; every later call would fail as well.
LOST_DEVICE = ("CUDA error", "Triton Error [CUDA]", "CUBLAS_STATUS_", "CUDNN_STATUS_", "device-side assert")


class StepFailures:
    """Of one engine, told of each of its steps."""

    def __init__(self) -> None:
        self._num_in_a_row = 0

    def forget(self) -> None:
        """A step succeeded."""
        self._num_in_a_row = 0

    def take(self, error: Exception) -> StepFailed:
        """What the requests of a step end with that raised `error`; raises it where the engine is to end as well."""
        self._num_in_a_row += 1
        if shows_lost_device(error) or self._num_in_a_row >= MAX_FAILURES_IN_A_ROW:
            raise error
        logger.error("a step of the engine failed, its requests end", exc_info=error)
        return StepFailed(f"a step of the engine failed with this request in it: {type(error).__name__}")


def shows_lost_device(error: Exception) -> bool:
    """Whether an error says that an accelerator, or the memory it works on, is broken. Running out of it is no such."""
    if isinstance(error, torch.OutOfMemoryError):
        return False
    return isinstance(error, torch.AcceleratorError) or any(text in str(error) for text in LOST_DEVICE)


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
        self._admission = AdmissionCheck(
            vocab_size=tokenizer.vocab_size,
            spec=model.state_spec,
            fingerprint=fingerprint,
        )
        runs = executor(model, num_rows=config.max_slots, poison=poison)
        self._scheduler = Scheduler(
            max_slots=config.max_slots,
            token_budget=config.token_budget,
            queue_limit=config.queue_limit,
            prompt_unit=runs.prompt_unit,
        )
        self._runner = Runner(runs)
        self._live = LiveRequests()
        self._failures = StepFailures()
        self._watched = WatchedRequests(probe, clock=clock)
        self._speculation = Speculation(config, is_possible=runs.savepoint is not None)
        self._hindrances = Hindrances(runs.look_ahead if runs.savepoint is None else None)
        self._launched: LaunchedStep | None = None  # in flight; one of its requests is not over
        counted = EngineStats(max_slots=config.max_slots, state_pool_bytes=self._runner.pool.num_bytes)
        self._accounts = Accounts(counted, meter=meter, observer=observer)
        self._outcomes = Outcomes(
            live=self._live,
            scheduler=self._scheduler,
            runner=self._runner,
            accounts=self._accounts,
            watched=self._watched,
            speculation=self._speculation,
            hindrances=self._hindrances,
            tokenizer=tokenizer,
            clock=clock,
        )

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
            events += self._outcomes.finish(
                sequence, FinishReason.ABORT if error is None else FinishReason.ERROR, error=error
            )
        if self._launched is not None and not self._launched.has_any(self._live.running):
            self._launched = None
        return events

    def _charge_in_flight(self, sequence: RunningSequence) -> None:
        """For its part in the step in flight, whose result it will not see."""
        launched, slot = self._launched, sequence.slot
        if launched is not None and slot is not None and launched.has(slot, sequence):
            seconds = self._outcomes.seconds_of(launched)
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
            self._outcomes.fail(self._live.of(plan), self._failures.take(error), events)

    def _step_ahead(self, launched: LaunchedStep | None, plan: Plan, events: Events) -> None:
        """What the step in flight gave, once that of `plan` is launched behind it. Without one in flight, that of
        `plan` is it, and the one after it is launched behind it.
        """
        if launched is None:
            try:
                launched = self._launch(plan, None)
            except Exception as error:
                self._outcomes.fail(self._live.of(plan), self._failures.take(error), events)
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
            self._outcomes.fail(self._live.of(plan), self._failures.take(failure), events)
        elif following is not None and following.has_any(self._live.running):
            self._launched = following

    def _launch(self, plan: Plan, before: LaunchedStep | None) -> LaunchedStep:
        self._open(plan)
        self._accounts.begin(plan, self._live.running, self._runner.pool, may_look=before is None)
        launched = self._runner.launch(plan, self._live.running, before)
        self._scheduler.apply(plan)
        return launched

    def _settle(self, launched: LaunchedStep, following: LaunchedStep | None, events: Events) -> None:
        """Waits for the step in flight and applies it. One that fails takes the step behind it along."""
        try:
            ids = launched.wait()
        except Exception as error:
            behind = [] if following is None else following.sequences.values()
            self._outcomes.fail([*launched.sequences.values(), *behind], self._failures.take(error), events)
            return
        try:
            self._outcomes.apply_launched(launched, ids, following, events)
            self._failures.forget()
        except Exception as error:
            self._outcomes.fail(launched.sequences.values(), self._failures.take(error), events)

    def _advance(self, plan: Plan, events: Events) -> None:
        """Runs the plan. What became visible is in `events`, also where this raises in the middle."""
        self._open(plan)
        self._accounts.begin(plan, self._live.running, self._runner.pool)
        started = time.monotonic()
        routing = self._watched.look(plan, self._live.running, self._runner.pool)
        drafts = self._speculation.propose(plan, self._live.running)
        result = self._runner.run(plan, self._live.running, drafts)
        self._accounts.charge(plan, self._live.running, time.monotonic() - started, result.num_read)
        self._scheduler.apply(plan)
        self._outcomes.apply(plan, result, routing, events, drafts)

    def _open(self, plan: Plan) -> None:
        now = self._clock()
        for admission in plan.admitted:
            sequence = self._live.by_id[admission.request_id]
            sequence.timeline.admitted = now
            self._runner.open(admission.slot, sequence)
            self._live.open(admission.slot, sequence)
            self._watched.add(admission.slot, sequence)
            self._speculation.add(admission.slot, sequence)
            self._hindrances.add(admission.slot, sequence)
            self._accounts.counted.tokens_resumed += sequence.resumed_position
