"""Turns plans into calls of the executor, and logits into tokens: the only part of the engine that touches tensors."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from nsm_core.engine.overlap import LaunchedStep, upcoming
from nsm_core.engine.request import Resume
from nsm_core.engine.scheduler import Chunk, Plan, group_by_length
from nsm_core.engine.sequence import RunningSequence
from nsm_core.engine.speculation import NO_DRAFTS, DraftedStates, Drafts
from nsm_core.errors import NumericalError
from nsm_core.execution.base import Executor
from nsm_core.sampling.device import LaunchedTokens
from nsm_core.sampling.logprobs import prompt_logprobs
from nsm_core.sampling.result import SampledToken, TokenLogprob
from nsm_core.sampling.sampler import SampledRow, Sampler, SamplingRow
from nsm_core.state.spec import State


class Hidden:
    """By slot. Slots of one token stay rows of one tensor: a step may have hundreds of them."""

    def __init__(self, slots: Sequence[int] = (), rows: Tensor | None = None) -> None:
        """rows [len(slots),d]: after the one token of each of `slots`."""
        self._slots, self._rows = list(slots), rows
        self._chunks: dict[int, Tensor] = {}

    def add(self, slots: Sequence[int], chunks: Sequence[Tensor]) -> None:
        """chunks[i] [length,d] belongs to slots[i]."""
        self._chunks.update(zip(slots, chunks, strict=True))

    def chunk(self, slot: int) -> Tensor:
        """[length,d]."""
        if self._rows is None or slot in self._chunks:
            return self._chunks[slot]
        index = self._slots.index(slot)
        return self._rows[index : index + 1]

    def last(self, slots: Sequence[int]) -> Tensor:
        """[len(slots),d]: after each slot's last token. Fast where those of one token come first, in their order."""
        num_rows = len(self._slots)
        if self._rows is None or slots[:num_rows] != self._slots:
            return torch.cat([self.chunk(slot)[-1:] for slot in slots])
        if len(slots) == num_rows:
            return self._rows
        return torch.cat([self._rows, *(self._chunks[slot][-1:] for slot in slots[num_rows:])])

    def tails(self, slots: Sequence[int], lengths: Sequence[int]) -> Tensor:
        """[sum of lengths,d]: after each of a slot's last tokens."""
        return torch.cat([self.chunk(slot)[-length:] for slot, length in zip(slots, lengths, strict=True)])


@dataclasses.dataclass(frozen=True, slots=True)
class StepResult:
    """What a step gave, by slot. A slot whose numbers are not finite has a NumericalError; nobody else is touched.

    `sampled`: slots that have read all their prompt. `scored`: the log-probabilities of the prompt tokens that follow
    the ones read in this step, where they were asked for. `further`: what comes after `sampled`, of the slots that had
    drafts: one for each that was accepted. `num_read`: tokens that decoding slots have read, where it was not one.
    """

    sampled: dict[int, SampledToken | NumericalError] = dataclasses.field(default_factory=dict)
    scored: dict[int, tuple[TokenLogprob, ...]] = dataclasses.field(default_factory=dict)
    further: dict[int, list[SampledToken | NumericalError]] = dataclasses.field(default_factory=dict)
    num_read: dict[int, int] = dataclasses.field(default_factory=dict)


class Runner:
    """An executor with the states of the running sequences, and the sampler. Not thread-safe: one thread calls it."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._look_ahead = executor.look_ahead
        self._sampler = Sampler(executor.draw)
        self.pool = executor.pool
        self._drafted = DraftedStates()

    def open(self, slot: int, sequence: RunningSequence) -> None:
        """Lease the slot and put the resumed state, or the learned start, into it."""
        resume = sequence.request.resume
        self.pool.lease(slot)
        try:
            self.pool.write(slot, self._executor.initial if resume is None else _stored(resume, self._executor))
            if self._look_ahead is not None:
                self._look_ahead.pause_at(slot, sequence.output.end_ids | sequence.pausing_ids)
        except Exception:
            self.close(slot)
            raise

    def close(self, slot: int) -> None:
        """Give the slot back."""
        self._drafted.remove(slot)
        self.pool.free(slot)

    def take_back(self, slot: int, sequence: RunningSequence) -> None:
        """If the last step had drafts for the slot, its state is the one before them."""
        self._drafted.take_back(slot, sequence)

    @torch.inference_mode()
    def run(self, plan: Plan, sequences: Mapping[int, RunningSequence], drafts: Drafts = NO_DRAFTS) -> StepResult:
        """Every slot of the plan reads its tokens; those that have read everything get a sampled token, and one more
        for each of their `drafts` that was sampled anyway.
        """
        result = StepResult()
        self._drafted.begin_step()
        # A chunk of one token is what decoding does: it rides along
        singles = [chunk for chunk in plan.prefill if chunk.length == 1]
        if drafts or self._drafted.has_behind:
            hidden = self._read_drafts(plan.decode, singles, sequences, drafts, result)
        else:
            hidden = self._read_one_each(plan.decode, singles, sequences)
        self._read_prompts([chunk for chunk in plan.prefill if chunk.length > 1], sequences, hidden)
        for chunk in plan.prefill:
            if sequences[chunk.slot].request.prompt_logprobs is not None:
                self._score(chunk, hidden.chunk(chunk.slot), sequences[chunk.slot], result)
        ready = [slot for slot in _ready(plan, sequences) if slot not in result.sampled]
        if drafts:
            self._sample_after_drafts(ready, drafts, hidden, sequences, result)
        else:
            self._sample(ready, hidden, sequences, result)
        return result

    @torch.inference_mode()
    def launch(self, plan: Plan, sequences: Mapping[int, RunningSequence], before: LaunchedStep | None) -> LaunchedStep:
        """`run` without waiting, for sequences that may look ahead; `before` is still in flight, if it is given.

        Raises what the executor raises.
        """
        if self._look_ahead is None:
            raise RuntimeError("this executor waits for every step")
        hidden, singles = Hidden(), [chunk for chunk in plan.prefill if chunk.length == 1]
        if plan.decode or singles:
            slots = sorted((*plan.decode, *(chunk.slot for chunk in singles))) if singles else list(plan.decode)
            hidden = Hidden(slots, self._look_ahead.step(slots, upcoming(slots, singles, sequences, before)))
        self._read_prompts([chunk for chunk in plan.prefill if chunk.length > 1], sequences, hidden)
        # in front of the tokens: who has waited for them has waited for the copies
        kept = {
            chunk.slot: self.pool.copy(chunk.slot)
            for chunk in plan.prefill
            if chunk.start + chunk.length in sequences[chunk.slot].request.keep_states_at
        }
        ready = _ready(plan, sequences)
        rows = [sequences[slot] for slot in ready]
        tokens = self._sampler.launch(self._executor.logits(hidden.last(ready)), rows) if ready else self._no_tokens()
        ending = set()
        for slot, row in zip(ready, rows, strict=True):
            row.num_in_flight += 1
            if len(row.sampled) + row.num_in_flight == row.params.max_tokens:
                ending.add(slot)
        taking_part = dict(zip(ready, rows, strict=True))
        taking_part |= {chunk.slot: sequences[chunk.slot] for chunk in plan.prefill}
        return LaunchedStep(plan, taking_part, ready, tokens, ending, kept)

    def _no_tokens(self) -> LaunchedTokens:
        """To wait for all the same: nobody is to launch steps without end."""
        return LaunchedTokens(next(iter(self._executor.initial.values())).new_empty(0, dtype=torch.int64))

    @torch.inference_mode()
    def pack(self, slot: int, *, is_at_rest: bool = True) -> bytes:
        """The slot's state. `is_at_rest`: nothing that was launched and not waited for has touched it."""
        with self._beside() if is_at_rest else nullcontext():
            return self.pool.pack(slot)

    @torch.inference_mode()
    def pack_kept(self, state: State) -> bytes:
        """A copy of a step that has been waited for."""
        with self._beside():
            return self.pool.spec.pack(state)

    def _beside(self) -> AbstractContextManager[object]:
        return nullcontext() if self._look_ahead is None else self._look_ahead.beside()

    @torch.inference_mode()
    def feed(self, slot: int, ids: Sequence[int], *, since: State | None = None) -> None:
        """The slot reads `ids` (may be none) on top of `since` [1, *shape], or of what it holds."""
        if since is not None:
            self.pool.write(slot, since)
        if ids:
            self._executor.read((slot,), (ids,))

    def _read_one_each(
        self, decode: Sequence[int], singles: Sequence[Chunk], sequences: Mapping[int, RunningSequence]
    ) -> Hidden:
        """One token for each slot."""
        ids = {slot: sequences[slot].sampled[-1] for slot in decode}
        ids |= {chunk.slot: sequences[chunk.slot].read_ids[chunk.start] for chunk in singles}
        if not ids:
            return Hidden()
        slots = sorted(ids)  # neighbours in a pool are read without a copy
        return Hidden(slots, self._executor.step(slots, [ids[slot] for slot in slots]))

    def _read_drafts(
        self,
        decode: Sequence[int],
        singles: Sequence[Chunk],
        sequences: Mapping[int, RunningSequence],
        drafts: Drafts,
        result: StepResult,
    ) -> Hidden:
        """Slots that decode read all of their text, and their drafts."""
        ids = {slot: (*sequences[slot].unread, *drafts.get(slot, ())) for slot in decode}
        result.num_read.update({slot: len(own) for slot, own in ids.items() if len(own) > 1})
        savepoint = self._executor.savepoint
        for slot in decode:
            if slot in drafts and savepoint is not None:
                self._drafted.begin(slot, sequences[slot], savepoint(slot, len(ids[slot])))
            else:
                self._drafted.catch_up(slot, sequences[slot])
        ids |= {chunk.slot: (sequences[chunk.slot].read_ids[chunk.start],) for chunk in singles}
        hidden, slots = Hidden(), sorted(ids)
        if all(len(own) == 1 for own in ids.values()):
            hidden.add(slots, torch.split(self._executor.step(slots, [ids[slot][0] for slot in slots]), 1))
        else:
            hidden.add(slots, self._executor.read(slots, [ids[slot] for slot in slots]))
        return hidden

    def _read_prompts(self, chunks: Sequence[Chunk], sequences: Mapping[int, RunningSequence], hidden: Hidden) -> None:
        """Those of like lengths together."""
        for group in group_by_length(chunks):
            slots = [chunk.slot for chunk in group]
            ids = [sequences[chunk.slot].read_ids[chunk.start : chunk.start + chunk.length] for chunk in group]
            hidden.add(slots, self._executor.read(slots, ids))

    def _score(self, chunk: Chunk, hidden: Tensor, sequence: RunningSequence, result: StepResult) -> None:
        """hidden [length,d]: the logits after token t are the distribution of prompt token t + 1."""
        request = sequence.request
        targets = request.prompt_ids[chunk.start + 1 : chunk.start + chunk.length + 1]
        logits = self._executor.logits(hidden[: len(targets)])
        try:
            result.scored[chunk.slot] = prompt_logprobs(logits, targets, request.prompt_logprobs or 0)
        except NumericalError as error:
            result.sampled[chunk.slot] = error

    def _sample(
        self,
        slots: list[int],
        hidden: Hidden,
        sequences: Mapping[int, RunningSequence],
        result: StepResult,
    ) -> None:
        if not slots:
            return
        logits = self._executor.logits(hidden.last(slots))
        rows = [sequences[slot] for slot in slots]
        result.sampled.update(zip(slots, self._sampler.sample(logits, rows), strict=True))

    def _sample_after_drafts(
        self,
        slots: list[int],
        drafts: Drafts,
        hidden: Hidden,
        sequences: Mapping[int, RunningSequence],
        result: StepResult,
    ) -> None:
        """As single steps would have: what is sampled after a draft counts if the draft was sampled before it."""
        lengths = [1 + len(drafts.get(slot, ())) for slot in slots]
        rows = [row for slot, length in zip(slots, lengths, strict=True) for row in _rows(sequences[slot], length)]
        sampled = iter(self._sampler.sample(self._executor.logits(hidden.tails(slots, lengths)), rows))
        for slot, length in zip(slots, lengths, strict=True):
            first, *further = _agreed(list(itertools.islice(sampled, length)), drafts.get(slot, ()))
            result.sampled[slot] = first
            if slot in drafts:
                result.further[slot] = further
            if len(further) + 1 < length:
                self._drafted.take_back(slot, sequences[slot])


def _stored(resume: Resume, executor: Executor) -> State:
    """Where the pool is, without waiting for what is computed there."""
    return executor.pool.spec.unpack(resume.state, next(iter(executor.initial.values())).device)


def _rows(sequence: RunningSequence, number: int) -> list[SampledRow]:
    """The next `number` places of a text, of which tokens sampled between them change nothing but the position."""
    params, counts, position = sequence.params, sequence.generated_counts, sequence.position
    later = [
        SamplingRow(params=params, position=position + offset, generated_counts=counts) for offset in range(1, number)
    ]
    return [sequence, *later]


def _agreed(sampled: list[SampledToken | NumericalError], drafts: Sequence[int]) -> list[SampledToken | NumericalError]:
    """sampled[i + 1] came after drafts[i]: those of `sampled` up to the first that is not the draft in its place."""
    for index, draft in enumerate(drafts):
        token = sampled[index]
        if not isinstance(token, SampledToken) or token.token_id != draft:
            return sampled[: index + 1]
    return sampled


def _ready(plan: Plan, sequences: Mapping[int, RunningSequence]) -> list[int]:
    """The slots that have read all they have to, those of one token first, in the order in which these are read."""
    last = [chunk for chunk in plan.prefill if _is_last(chunk, sequences)]
    if not last:
        return list(plan.decode)
    single = [chunk.slot for chunk in last if chunk.length == 1]
    return [*sorted((*plan.decode, *single)), *(chunk.slot for chunk in last if chunk.length > 1)]


def _is_last(chunk: Chunk, sequences: Mapping[int, RunningSequence]) -> bool:
    return chunk.start + chunk.length == len(sequences[chunk.slot].read_ids)
