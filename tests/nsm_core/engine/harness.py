"""Small models and drivers for engine tests."""

from __future__ import annotations

import dataclasses
import functools
import struct
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from nsm_core.config import EngineConfig
from nsm_core.energy.meter import EnergyMeter
from nsm_core.engine.engine import Engine
from nsm_core.engine.request import (
    EndState,
    Event,
    Finished,
    GenerationRequest,
    PromptScored,
    Resume,
    TokenEvent,
)
from nsm_core.engine.token_text import TokenText
from nsm_core.execution.base import Executor, ExecutorFactory, NextInputs, Rounds, Savepoint, SequenceModel
from nsm_core.execution.eager import EagerExecutor
from nsm_core.sampling.device import PendingTokens
from nsm_core.sampling.params import SamplingParams
from nsm_core.sampling.result import SKIPPED
from nsm_core.sampling.sampler import Sampler, SamplingRow
from nsm_core.state.spec import State, StateSpec, TensorSpec
from nsm_core.tokenizer import Tokenizer
from tests.support.models import RandomModel

FINGERPRINT = "test-model"
# fp32: what different splits, batches and kernels may differ by, relative to states of size about 1
TOLERANCE = 2e-4


@functools.cache
def small_model() -> RandomModel:
    """Shared: nothing changes it."""
    return RandomModel()


class ScriptedModel:
    """A SequenceModel that says a script: token i is sampled after `prompt_len` + i tokens were fed, then `end_id` for
    ever. Its state is a hash chain over the ids fed, so that any wrong, lost or repeated token shows exactly.
    """

    state_spec = StateSpec((TensorSpec("position", (), torch.int64), TensorSpec("trace", (), torch.int64)))

    def __init__(self, script: Sequence[int], *, vocab_size: int, prompt_len: int = 1, end_id: int = 0) -> None:
        self._script = torch.tensor([*script, end_id])
        self._prompt_len = prompt_len
        self._vocab_size = vocab_size

    def initial_state(self, batch_size: int) -> State:
        return self.state_spec.zeros(batch_size)

    def forward(self, ids: Tensor, state: State, lengths: Tensor | None = None) -> tuple[Tensor, State]:
        if lengths is None:
            lengths = torch.full((ids.shape[0],), ids.shape[1])
        hidden = []
        for index in range(ids.shape[1]):
            _, fed = self.step(ids[:, index], state)
            state = {name: torch.where(index < lengths, fed[name], state[name]) for name in fed}
            hidden.append(state["position"].float()[:, None])
        return torch.stack(hidden, dim=1), state

    def step(self, ids: Tensor, state: State) -> tuple[Tensor, State]:
        trace = state["trace"] * 6364136223846793005 + ids + 1442695040888963407
        position = state["position"] + 1
        return position.float()[:, None], {"position": position, "trace": trace}

    def logits(self, hidden: Tensor) -> Tensor:
        at = (hidden[..., 0].long() - self._prompt_len).clamp(0, len(self._script) - 1)
        return torch.nn.functional.one_hot(self._script[at], self._vocab_size).float() * 10


class ExactExecutor(EagerExecutor):
    """Of models that give the same bits however a text is cut, as a ScriptedModel does: drafts may be taken back."""

    def savepoint(self, row: int, num_tokens: int, /) -> Savepoint:  # type: ignore[override]
        return _WholeRow(self, row)


class _WholeRow:
    def __init__(self, executor: EagerExecutor, row: int) -> None:
        self._pool, self._row, self._state = executor.pool, row, executor.pool.copy(row)

    def restore(self) -> None:
        self._pool.write(self._row, self._state)


class FakeOverlap:
    """Computes launched steps at once, in the order of the calls, as a device would."""

    min_rows = 1

    def __init__(self, executor: Executor, num_rounds: int = 0) -> None:
        """`num_rounds`: of a launch, at most."""
        self._executor, self._num_rounds = executor, num_rounds
        self.num_decodes = 0
        self._width = 1
        self._pauses: dict[int, frozenset[int]] = {}
        self.num_skipped = 0  # times that a row was not touched
        self.num_side_reads = 0  # times that something was read without waiting

    def pause_at(self, row: int, ids: Collection[int]) -> None:
        self._pauses[row] = frozenset(ids)

    def step(self, rows: Sequence[int], inputs: NextInputs) -> Tensor:
        ids, live = self._resolved(rows, inputs)
        hidden = torch.full((len(rows), self._width), torch.nan)
        if live:
            stepped = self._executor.step([rows[index] for index in live], [ids[index] for index in live])
            hidden = hidden[:, :1].repeat(1, stepped.shape[1])
            hidden[live], self._width = stepped, stepped.shape[1]
        return hidden

    def _resolved(self, rows: Sequence[int], inputs: NextInputs) -> tuple[list[int], list[int]]:
        """The ids, and which rows take part."""
        sampled = [] if inputs.sampled is None else inputs.sampled.tolist()
        ids = inputs.ids.tolist()
        live = []
        for index, (row, source) in enumerate(zip(rows, inputs.sources.tolist(), strict=True)):
            ids[index] = ids[index] if source < 0 else sampled[source]
            if source < 0 or self._goes_on(row, ids[index]):
                live.append(index)
        self.num_skipped += len(rows) - len(live)
        return ids, live

    def _goes_on(self, row: int, token_id: int) -> bool:
        return token_id >= 0 and token_id not in self._pauses[row]

    def most_rounds(self, num_rows: int) -> int:
        return self._num_rounds

    def decode(self, rows: Sequence[int], inputs: NextInputs, rounds: Rounds) -> PendingTokens:
        self.num_decodes += 1
        ids, live = self._resolved(rows, inputs)
        tokens = np.full((rounds.number, len(rows)), SKIPPED, np.int64)
        sampler = Sampler(self._executor.draw, self._executor.mask)
        for number in range(rounds.number):
            if not live:
                break
            hidden = self._executor.step([rows[index] for index in live], [ids[index] for index in live])
            draws = [_sampling_row(rounds.choices[index].tobytes(), number) for index in live]
            (chosen,) = sampler.launch(self._executor.logits(hidden), draws, rounds.choices[live]).wait().tolist()
            for index, token_id in zip(live, chosen, strict=True):
                ids[index] = tokens[number, index] = token_id
            live = [i for i in live if self._goes_on(rows[i], ids[i]) and rounds.limits[i] > number + 1]
        return PendingTokens(torch.from_numpy(tokens[-1]), torch.from_numpy(tokens))

    def side_stream(self) -> AbstractContextManager[object]:
        self.num_side_reads += 1
        return nullcontext()


def _sampling_row(packed: bytes, number: int) -> SamplingRow:
    """The inverse of `pack_sampling_params`, so many tokens later."""
    seed, choice_index, position, top_k, temperature, top_p, min_p = struct.unpack("<QQQQddd", packed)
    params = SamplingParams(
        seed=seed, choice_index=choice_index, top_k=top_k, temperature=temperature, top_p=top_p, min_p=min_p
    )
    return SamplingRow(params=params, position=position + number, generated_counts={})


def overlapped(factory: ExecutorFactory = EagerExecutor, num_rounds: int = 0) -> ExecutorFactory:
    """The same executor with overlapped steps, of up to `num_rounds` tokens a row, and without drafts."""

    def make(model: SequenceModel, *, num_rows: int, poison: bool) -> Executor:
        executor: Any = factory(model, num_rows=num_rows, poison=poison)
        executor.savepoint, executor.overlap = None, FakeOverlap(executor, num_rounds)
        return cast(Executor, executor)

    return make


default_executor: ExecutorFactory = EagerExecutor  # of make_engine; conftest.py changes it


@dataclasses.dataclass
class Outcome:
    """All that one request gave."""

    events: list[Event] = dataclasses.field(default_factory=list)

    @property
    def tokens(self) -> list[TokenEvent]:
        return [event for event in self.events if isinstance(event, TokenEvent)]

    @property
    def ids(self) -> list[int]:
        return [event.token_id for event in self.tokens]

    @property
    def is_over(self) -> bool:
        return bool(self.events) and isinstance(self.events[-1], Finished)

    @property
    def finished(self) -> Finished:
        (finished,) = [event for event in self.events if isinstance(event, Finished)]
        assert self.events[-1] is finished
        return finished

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.tokens) + self.finished.text

    @property
    def scored(self) -> PromptScored:
        first = self.events[0]
        assert isinstance(first, PromptScored)
        return first

    @property
    def end_state(self) -> EndState:
        assert self.finished.end_state is not None
        return self.finished.end_state


def make_engine(
    model: SequenceModel,
    tokenizer: Tokenizer,
    *,
    max_slots: int = 4,
    token_budget: int = 64,
    queue_limit: int = 64,
    clock: Callable[[], float] = lambda: 0.0,
    executor: ExecutorFactory | None = None,
    speculation: str = "lookup",
    meter: EnergyMeter | None = None,
) -> Engine:
    """An engine whose free rows are NaN."""
    config = EngineConfig(
        max_slots=max_slots, token_budget=token_budget, queue_limit=queue_limit, speculation=speculation
    )
    return Engine(
        model,
        tokenizer,
        fingerprint=FINGERPRINT,
        config=config,
        executor=executor or default_executor,
        clock=clock,
        poison=True,
        meter=meter,
    )


def make_request(
    name: str = "a",
    prompt_ids: Sequence[int] = (0,),
    *,
    resume: Resume | None = None,
    keep_state: bool = True,
    prompt_logprobs: int | None = None,
    deadline: float | None = None,
    temperature: float = 0.0,
    max_tokens: int = 8,
    ignore_eos: bool = True,
    stop: tuple[str, ...] = (),
    stop_token_ids: tuple[int, ...] = (),
    seed: int = 0,
    repetition_penalty: float = 1.0,
    logprobs: int | None = None,
    logit_bias: Mapping[int, float] | None = None,
    generated_counts: Mapping[int, int] | None = None,
) -> GenerationRequest:
    """Greedy, 8 tokens, state kept."""
    sampling = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        ignore_eos=ignore_eos,
        stop=stop,
        stop_token_ids=stop_token_ids,
        seed=seed,
        repetition_penalty=repetition_penalty,
        logprobs=logprobs,
        logit_bias=logit_bias or {},
    )
    return GenerationRequest(
        request_id=name,
        prompt_ids=tuple(prompt_ids),
        sampling=sampling,
        resume=resume,
        keep_state=keep_state,
        prompt_logprobs=prompt_logprobs,
        deadline=deadline,
        generated_counts=generated_counts or {},
    )


def random_ids(seed: int, length: int, vocab_size: int = 512) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(vocab_size, (length,), generator=generator).tolist())


def run_all(
    engine: Engine,
    requests: Sequence[GenerationRequest],
    *,
    arrivals: Sequence[int] = (),
    reads_ids: Tokenizer | None = None,
) -> dict[str, Outcome]:
    """Runs requests to their end; request i is added before step arrivals[i] (0 when not given). With `reads_ids` they
    have tags, and texts are made here.
    """
    results = {request.request_id: Outcome() for request in requests}
    texts = {
        request.request_id: TokenText(reads_ids, request)
        for request in requests
        if reads_ids is not None and request.has_free_text
    }
    waiting = sorted(zip([*arrivals, *[0] * (len(requests) - len(arrivals))], range(len(requests)), strict=True))
    num_steps = 0
    while waiting or engine.has_work:
        while waiting and (waiting[0][0] <= num_steps or not engine.has_work):
            index = waiting.pop(0)[1]
            engine.add(requests[index], tag=None if reads_ids is None else index)
        events = engine.step()
        reported: list[tuple[str, Event | int]] = [
            (requests[tag].request_id, token_id)
            for batch in engine.take_tokens()
            for tag, token_id in zip(batch.tags.tolist(), batch.ids.tolist(), strict=True)
        ]
        for request_id, event in (*reported, *events):
            text = texts.get(request_id)
            if text is not None:
                event = text.event_of(event)
            assert not isinstance(event, int)
            results[request_id].events.append(event)
        num_steps += 1
    return results


def run_one(engine: Engine, request: GenerationRequest) -> Outcome:
    return run_all(engine, [request])[request.request_id]


def resume_from(end: EndState) -> tuple[Resume, tuple[int, ...]]:
    """The next turn's resumed state, and the pending token it must begin with."""
    resume = Resume(
        state=end.state, position=end.position, fingerprint=FINGERPRINT, generated_counts=end.generated_counts
    )
    return resume, () if end.pending is None else (end.pending,)


@torch.inference_mode()
def replay(model: SequenceModel, ids: Sequence[int]) -> State:
    """The state of one unbroken run over `ids`."""
    return model.forward(torch.tensor([list(ids)]), model.initial_state(1))[1]


def assert_same_state(model: SequenceModel, got: bytes, want: State) -> None:
    """Within the tolerance; the position exactly."""
    state = model.state_spec.unpack(got)
    assert state["position"].tolist() == want["position"].tolist()
    torch.testing.assert_close(state, want, rtol=TOLERANCE, atol=TOLERANCE)


def assert_log_and_state_agree(model: SequenceModel, end: EndState, log_before: Sequence[int] = ()) -> None:
    """R12: the state is that of one run over all ids of the log but a pending one."""
    log = [*log_before, *end.new_ids]
    fed = log if end.pending is None else log[:-1]
    assert end.pending is None or end.pending == log[-1]
    assert end.position == len(fed)
    assert_same_state(model, end.state, replay(model, fed))
