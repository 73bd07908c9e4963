"""Executes plans on the model: the only part of the engine that touches tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from nsm_core.engine.batching import group_by_length
from nsm_core.engine.request import Resume
from nsm_core.engine.scheduler import Chunk, Plan
from nsm_core.engine.sequence import RunningSequence
from nsm_core.errors import NumericalError
from nsm_core.sampling.logprobs import prompt_logprobs
from nsm_core.sampling.result import SampledToken, TokenLogprob
from nsm_core.sampling.sampler import Sampler, SamplingRow
from nsm_core.state.pool import StatePool
from nsm_core.state.spec import State, StateSpec


class SequenceModel(Protocol):
    """What a model must offer to be served. Functional: a state that is given is never modified."""

    @property
    def state_spec(self) -> StateSpec: ...

    def initial_state(self, batch_size: int) -> State:
        """The start of a sequence, tensors [batch_size, *shape]."""
        ...

    def forward(self, ids: Tensor, state: State, lengths: Tensor | None = None) -> tuple[Tensor, State]:
        """ids [B,T], right-padded to `lengths` [B]; returns hidden [B,T,d] and the state after each row's end."""
        ...

    def step(self, ids: Tensor, state: State) -> tuple[Tensor, State]:
        """ids [B] -> hidden [B,d] and the new state."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [..., d] -> logits [..., V] fp32."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class StepResult:
    """What a step gave, by slot. A slot whose numbers are not finite has a NumericalError; nobody else is touched.

    `sampled`: slots that have read all their prompt. `scored`: the log-probabilities of the prompt tokens that follow
    the ones read in this step, where they were asked for.
    """

    sampled: dict[int, SampledToken | NumericalError] = dataclasses.field(default_factory=dict)
    scored: dict[int, tuple[TokenLogprob, ...]] = dataclasses.field(default_factory=dict)


class Runner:
    """A model, the states of the running sequences and the sampler. Not thread-safe: one thread calls it."""

    def __init__(self, model: SequenceModel, *, num_rows: int, poison: bool = False) -> None:
        self._model = model
        self._sampler = Sampler()
        with torch.inference_mode():
            self._initial = model.initial_state(1)
        self._device = next(iter(self._initial.values())).device
        self.pool = StatePool(model.state_spec, num_rows, self._device, poison=poison)

    def open(self, slot: int, resume: Resume | None) -> None:
        """Lease the slot and put the resumed state, or the learned start, into it."""
        self.pool.lease(slot)
        self.pool.write(slot, self._initial if resume is None else self.pool.spec.unpack(resume.state))

    def close(self, slot: int) -> None:
        """Give the slot back."""
        self.pool.free(slot)

    @torch.inference_mode()
    def run(self, plan: Plan, sequences: Mapping[int, RunningSequence]) -> StepResult:
        """Every slot of the plan reads its tokens; those that have read everything get a sampled token."""
        result = StepResult()
        # A chunk of one token is what decoding does: it rides along
        singles = [chunk for chunk in plan.prefill if chunk.length == 1]
        hidden = self._read_one_each(plan.decode, singles, sequences)
        for group in group_by_length([chunk for chunk in plan.prefill if chunk.length > 1]):
            hidden.update(self._read_group(group, sequences))
        for chunk in plan.prefill:
            if sequences[chunk.slot].request.prompt_logprobs is not None:
                self._score(chunk, hidden[chunk.slot], sequences[chunk.slot], result)
        ready = [*plan.decode, *(chunk.slot for chunk in plan.prefill if _is_last(chunk, sequences))]
        self._sample([slot for slot in ready if slot not in result.sampled], hidden, sequences, result)
        return result

    @torch.inference_mode()
    def feed(self, slot: int, ids: Sequence[int], *, since: State | None = None) -> None:
        """The slot reads `ids` (may be none) on top of `since` [1, *shape], or of what it holds."""
        state = self.pool.gather((slot,)) if since is None else since
        if ids:
            _, state = self._model.forward(self._tensor([list(ids)]), state)
        if ids or since is not None:
            self.pool.write(slot, state)

    def _read_one_each(
        self, decode: Sequence[int], singles: Sequence[Chunk], sequences: Mapping[int, RunningSequence]
    ) -> dict[int, Tensor]:
        """One token for each slot; returns hidden [1,d] by slot."""
        ids = {slot: sequences[slot].sampled[-1] for slot in decode}
        ids |= {chunk.slot: sequences[chunk.slot].read_ids[chunk.start] for chunk in singles}
        if not ids:
            return {}
        slots = sorted(ids)  # neighbours in the pool are read without a copy
        hidden, state = self._model.step(self._tensor([ids[slot] for slot in slots]), self.pool.gather(slots))
        self.pool.scatter(slots, state)
        return {slot: hidden[index : index + 1] for index, slot in enumerate(slots)}

    def _read_group(self, group: Sequence[Chunk], sequences: Mapping[int, RunningSequence]) -> dict[int, Tensor]:
        """One right-padded batch; returns hidden [length,d] by slot."""
        slots, max_len = [chunk.slot for chunk in group], max(chunk.length for chunk in group)
        rows = []
        for chunk in group:
            ids = sequences[chunk.slot].read_ids[chunk.start : chunk.start + chunk.length]
            rows.append([*ids, *[0] * (max_len - chunk.length)])
        is_ragged = any(chunk.length < max_len for chunk in group)
        lengths = self._tensor([chunk.length for chunk in group]) if is_ragged else None
        hidden, state = self._model.forward(self._tensor(rows), self.pool.gather(slots), lengths)
        self.pool.scatter(slots, state)
        return {chunk.slot: hidden[index, : chunk.length] for index, chunk in enumerate(group)}

    def _score(self, chunk: Chunk, hidden: Tensor, sequence: RunningSequence, result: StepResult) -> None:
        """hidden [length,d]: the logits after token t are the distribution of prompt token t + 1."""
        request = sequence.request
        targets = request.prompt_ids[chunk.start + 1 : chunk.start + chunk.length + 1]
        logits = self._model.logits(hidden[: len(targets)])
        try:
            result.scored[chunk.slot] = prompt_logprobs(logits, targets, request.prompt_logprobs or 0)
        except NumericalError as error:
            result.sampled[chunk.slot] = error

    def _sample(
        self,
        slots: Sequence[int],
        hidden: Mapping[int, Tensor],
        sequences: Mapping[int, RunningSequence],
        result: StepResult,
    ) -> None:
        if not slots:
            return
        logits = self._model.logits(torch.cat([hidden[slot][-1:] for slot in slots]))
        rows = [_sampling_row(sequences[slot]) for slot in slots]
        result.sampled.update(zip(slots, self._sampler.sample(logits, rows), strict=True))

    def _tensor(self, values: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)


def _is_last(chunk: Chunk, sequences: Mapping[int, RunningSequence]) -> bool:
    return chunk.start + chunk.length == len(sequences[chunk.slot].read_ids)


def _sampling_row(sequence: RunningSequence) -> SamplingRow:
    return SamplingRow(
        params=sequence.request.sampling, position=sequence.sample_position, generated_counts=sequence.counts
    )
