"""Runs plans: calls the executor and samples. The only part of the engine that handles tensors."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from nsm_core.engine.constraints import Constraints
from nsm_core.engine.overlap import InFlightStep, next_inputs
from nsm_core.engine.scheduler import Chunk, Plan, group_by_length
from nsm_core.engine.sequence import RunningSequence
from nsm_core.engine.speculation import NO_DRAFTS, DraftRollback, Drafts
from nsm_core.engine.token_rows import TokenRows
from nsm_core.errors import GrammarFailed, NumericalError
from nsm_core.execution.base import DecodeInputs, Executor, Rounds
from nsm_core.sampling.device import PendingTokens
from nsm_core.sampling.logprobs import prompt_logprobs
from nsm_core.sampling.result import SampledToken, TokenLogprob
from nsm_core.sampling.sampler import SampledRow, Sampler, SamplingRow
from nsm_core.state.spec import State
from nsm_core.state.to_device import to_device


class HiddenStates:
    """The hidden vectors of one step, by slot. Hundreds of slots may read one token: they stay rows of one tensor."""

    def __init__(self, slots: Sequence[int] = (), rows: Tensor | None = None) -> None:
        """rows [len(slots),d]: after the single token of each of `slots`."""
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
        """[len(slots),d]: after each slot's last token. Fast if the slots of one token come first, in their order."""
        if self._rows is None:
            return torch.cat([self.chunk(slot)[-1:] for slot in slots])
        rows, num_rows = self._rows, 0
        while num_rows < len(slots) and slots[num_rows] not in self._chunks:
            num_rows += 1
        if slots[:num_rows] != self._slots:  # some of them read on
            at = {slot: index for index, slot in enumerate(self._slots)}
            rows = rows[to_device(np.array([at[slot] for slot in slots[:num_rows]], np.int64), rows.device)]
        if len(slots) == num_rows:
            return rows
        return torch.cat([rows, *(self.chunk(slot)[-1:] for slot in slots[num_rows:])])

    def tails(self, slots: Sequence[int], lengths: Sequence[int]) -> Tensor:
        """[sum of lengths,d]: after each of the last lengths[i] tokens of slots[i]."""
        return torch.cat([self.chunk(slot)[-length:] for slot, length in zip(slots, lengths, strict=True)])


# What a row's sampling gave: a token, or why there is none
Sampled = SampledToken | NumericalError | GrammarFailed


@dataclasses.dataclass(frozen=True, slots=True)
class StepResult:
    """The result of a step, by slot. A slot whose logits are not finite has a NumericalError, and one whose grammar
    gave up a GrammarFailed; others are unaffected.

    `sampled`: for slots that have read their whole prompt. `scored`: log-probabilities of the prompt tokens that follow
    those read in this step, if requested. `further`: for slots with drafts, the tokens after `sampled`, one for each
    accepted draft. `num_read`: for decoding slots, the number of tokens read, if not one.
    """

    sampled: dict[int, Sampled] = dataclasses.field(default_factory=dict)
    scored: dict[int, tuple[TokenLogprob, ...]] = dataclasses.field(default_factory=dict)
    further: dict[int, list[Sampled]] = dataclasses.field(default_factory=dict)
    num_read: dict[int, int] = dataclasses.field(default_factory=dict)


class Runner:
    """The executor with the states of the running sequences, and the sampler. A SlotListener. Not thread-safe."""

    def __init__(self, executor: Executor, token_rows: TokenRows) -> None:
        """`token_rows`: of the steps that are launched without waiting."""
        self._executor, self._token_rows = executor, token_rows
        self._overlap = executor.overlap
        self._sampler = Sampler(executor.draw, executor.mask)
        self._constraints = Constraints()
        self.pool = executor.pool
        self._rollback = DraftRollback()
        self._fresh: set[int] = set()  # slots that are to begin at the learned start

    def open(self, slot: int, sequence: RunningSequence) -> None:
        """Leases the slot and writes the shared or resumed state into it; `start_fresh` writes the learned start."""
        self.pool.lease(slot)
        self._constraints.open(slot, sequence)
        try:
            resume = sequence.request.resume
            if sequence.shared_start is not None:
                self.pool.write(slot, sequence.shared_start)
            elif resume is not None and resume.held is None:
                self.pool.unpack(slot, resume.state)
            elif sequence.held_start is not None:
                sequence.held_start.copy_to(slot)
            else:
                self._fresh.add(slot)
            sequence.shared_start = sequence.held_start = None
            if self._overlap is not None:
                self._overlap.pause_at(slot, sequence.output.end_ids | sequence.pausing_ids)
        except Exception:
            self.close(slot)
            raise

    def start_fresh(self) -> None:
        """After all slots of a step were opened: the learned start for those that have no other, hundreds at once."""
        if self._fresh:
            rows, self._fresh = sorted(self._fresh), set()
            self.pool.fill(rows, self._executor.initial)

    def close(self, slot: int) -> None:
        """Frees the slot."""
        self._rollback.remove(slot)
        self._fresh.discard(slot)
        self._constraints.close(slot)
        self.pool.free(slot)

    def rollback_drafts(self, slot: int, sequence: RunningSequence) -> None:
        """Restores the state from before the drafts of the last step, if the slot had any."""
        self._rollback.rollback(slot, sequence)

    @torch.inference_mode()
    def run(self, plan: Plan, sequences: Mapping[int, RunningSequence], drafts: Drafts = NO_DRAFTS) -> StepResult:
        """Every slot of the plan reads its tokens. Slots that have read all their text get a sampled token, and another
        for each accepted draft.
        """
        result = StepResult()
        self._rollback.begin_step()
        # A chunk of one token is read like a decoded one
        singles = [chunk for chunk in plan.prefill if chunk.length == 1]
        others = [chunk for chunk in plan.prefill if chunk.length > 1]
        if others and self._executor.reads_ragged:
            hidden = self._read_texts(plan.decode, plan.prefill, sequences, drafts, result)
            others = []
        elif drafts or self._rollback.has_pending:
            hidden = self._read_texts(plan.decode, singles, sequences, drafts, result)
        else:
            hidden = self._read_one_each(plan.decode, singles, sequences)
        self._read_prompts(others, sequences, hidden)
        for chunk in plan.prefill:
            if sequences[chunk.slot].request.prompt_logprobs is not None:
                self._score(chunk, hidden.chunk(chunk.slot), sequences[chunk.slot], result)
        ready = [slot for slot in _ready(plan, sequences) if slot not in result.sampled]
        if drafts:
            self._sample_after_drafts(ready, drafts, hidden, sequences, result)
        else:
            self._sample(ready, hidden, sequences, result)
        return result

    def decode(self, slots: Sequence[int], inputs: DecodeInputs) -> npt.NDArray[np.int64]:
        """A slice: tokens [rounds, len(slots)], see `DecodeRounds`. No slot has more to read than its last token."""
        if self._executor.decode_rounds is None:
            raise RuntimeError("this executor decodes one token at a time")
        self._rollback.begin_step()
        return self._executor.decode_rounds(slots, inputs)

    @property
    def has_unread_text(self) -> bool:
        """Whether a decoding slot has more to read than its last token, after a rollback of drafts."""
        return self._rollback.has_pending

    @torch.inference_mode()
    def launch(self, plan: Plan, sequences: Mapping[int, RunningSequence], before: InFlightStep | None) -> InFlightStep:
        """`run` without waiting, for sequences that `may_overlap`. `before`: the step in flight, if there is one.

        Raises what the executor raises.
        """
        if self._overlap is None:
            raise RuntimeError("this executor waits for every step")
        hidden, singles = HiddenStates(), [chunk for chunk in plan.prefill if chunk.length == 1]
        if plan.decode or singles:
            slots = sorted((*plan.decode, *(chunk.slot for chunk in singles))) if singles else list(plan.decode)
            hidden = HiddenStates(slots, self._overlap.step(slots, next_inputs(slots, singles, sequences, before)))
        self._read_prompts([chunk for chunk in plan.prefill if chunk.length > 1], sequences, hidden)
        # before the tokens: waiting for them waits for the copies too
        prompt_states = {
            chunk.slot: self.pool.copy(chunk.slot)
            for chunk in plan.prefill
            if chunk.start + chunk.length in sequences[chunk.slot].request.keep_states_at
        }
        ready = _ready(plan, sequences)
        rows = [sequences[slot] for slot in ready]
        slots_of = np.array(ready, np.int64)
        if ready:
            logits = self._executor.logits(hidden.last(ready))
            tokens = self._sampler.launch(logits, rows, self._token_rows.packed_params(slots_of))
        else:
            tokens = self._no_tokens()
        ending = set(self._token_rows.launched(slots_of).tolist())
        taking_part = dict(zip(ready, rows, strict=True))
        taking_part |= {chunk.slot: sequences[chunk.slot] for chunk in plan.prefill}
        tags = self._token_rows.tags[slots_of]
        return InFlightStep(plan, taking_part, ready, tokens, ending, prompt_states, slots_of, tags)

    @torch.inference_mode()
    def launch_rounds(
        self, plan: Plan, sequences: Mapping[int, RunningSequence], before: InFlightStep | None, num_rounds: int
    ) -> InFlightStep:
        """`launch` of a plan whose slots all decode, for up to `num_rounds` tokens each."""
        if self._overlap is None:
            raise RuntimeError("this executor waits for every step")
        slots, rows = list(plan.decode), np.array(plan.decode, np.int64)
        inputs = next_inputs(slots, (), sequences, before)
        rounds = Rounds(self._token_rows.packed_params(rows), self._token_rows.num_left(rows), num_rounds)
        tokens = self._overlap.decode(slots, inputs, rounds)
        ending = set(self._token_rows.launched(rows, num_rounds).tolist())
        taking_part = {slot: sequences[slot] for slot in slots}
        tags = self._token_rows.tags[rows]
        return InFlightStep(plan, taking_part, slots, tokens, ending, {}, rows, tags, num_rounds)

    def _no_tokens(self) -> PendingTokens:
        """An empty result to wait for, so that launches cannot run ahead without bound."""
        return PendingTokens(next(iter(self._executor.initial.values())).new_empty(0, dtype=torch.int64))

    @torch.inference_mode()
    def pack(self, slot: int, *, is_complete: bool = True) -> bytes:
        """The slot's state as bytes. `is_complete`: every step that touched it has been waited for."""
        with self._side_stream() if is_complete else nullcontext():
            return self.pool.pack(slot)

    @torch.inference_mode()
    def pack_copy(self, state: State) -> bytes:
        """A copy [1, *shape] from a step that has been waited for, as bytes."""
        with self._side_stream():
            return self.pool.spec.pack(state)

    def _side_stream(self) -> AbstractContextManager[object]:
        return nullcontext() if self._overlap is None else self._overlap.side_stream()

    @torch.inference_mode()
    def feed(self, slot: int, ids: Sequence[int], *, since: State | None = None) -> None:
        """The slot reads `ids` (maybe none) on top of `since` [1, *shape], or of its own state."""
        if since is not None:
            self.pool.write(slot, since)
        if self._executor.prompt_unit > 1:  # as they are read when they are sampled
            for token_id in ids:
                self._executor.step((slot,), (token_id,))
        elif ids:
            self._executor.read((slot,), (ids,))

    def _read_one_each(
        self, decode: Sequence[int], singles: Sequence[Chunk], sequences: Mapping[int, RunningSequence]
    ) -> HiddenStates:
        """Each slot reads one token."""
        ids = {slot: sequences[slot].sampled[-1] for slot in decode}
        ids |= {chunk.slot: sequences[chunk.slot].read_ids[chunk.start] for chunk in singles}
        if not ids:
            return HiddenStates()
        slots = sorted(ids)  # neighbours in a pool are read without a copy
        return HiddenStates(slots, self._executor.step(slots, [ids[slot] for slot in slots]))

    def _read_texts(
        self,
        decode: Sequence[int],
        chunks: Sequence[Chunk],
        sequences: Mapping[int, RunningSequence],
        drafts: Drafts,
        result: StepResult,
    ) -> HiddenStates:
        """One call: decoding slots read all of their text and their drafts, the others their chunks."""
        ids = {slot: (*sequences[slot].unread, *drafts.get(slot, ())) for slot in decode}
        result.num_read.update({slot: len(own) for slot, own in ids.items() if len(own) > 1})
        savepoint = self._executor.savepoint
        for slot in decode:
            if slot in drafts and savepoint is not None:
                self._rollback.begin(slot, sequences[slot], savepoint(slot, len(ids[slot])))
            else:
                self._rollback.catch_up(slot, sequences[slot])
        ids |= {
            chunk.slot: sequences[chunk.slot].read_ids[chunk.start : chunk.start + chunk.length] for chunk in chunks
        }
        hidden, slots = HiddenStates(), sorted(ids)
        if all(len(own) == 1 for own in ids.values()):
            hidden.add(slots, torch.split(self._executor.step(slots, [ids[slot][0] for slot in slots]), 1))
        else:
            hidden.add(slots, self._executor.read(slots, [ids[slot] for slot in slots]))
        return hidden

    def _read_prompts(
        self, chunks: Sequence[Chunk], sequences: Mapping[int, RunningSequence], hidden: HiddenStates
    ) -> None:
        """Chunks of similar lengths are read together."""
        for group in group_by_length(chunks, unit=self._executor.prompt_unit):
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
        hidden: HiddenStates,
        sequences: Mapping[int, RunningSequence],
        result: StepResult,
    ) -> None:
        if not slots:
            return
        logits = self._executor.logits(hidden.last(slots))
        rows = [sequences[slot] for slot in slots]
        masks, failed = self._constraints.masks(slots, sequences, NO_DRAFTS)
        result.sampled.update(zip(slots, self._sampler.sample(logits, rows, masks), strict=True))
        result.sampled.update(failed)

    def _sample_after_drafts(
        self,
        slots: list[int],
        drafts: Drafts,
        hidden: HiddenStates,
        sequences: Mapping[int, RunningSequence],
        result: StepResult,
    ) -> None:
        """Samples after every draft. A token counts if all drafts before it were sampled too, as in single steps."""
        lengths = [1 + len(drafts.get(slot, ())) for slot in slots]
        rows = [row for slot, length in zip(slots, lengths, strict=True) for row in _rows(sequences[slot], length)]
        masks, failed = self._constraints.masks(slots, sequences, drafts)
        sampled = iter(self._sampler.sample(self._executor.logits(hidden.tails(slots, lengths)), rows, masks))
        for slot, length in zip(slots, lengths, strict=True):
            of_slot: list[Sampled] = [*itertools.islice(sampled, length)]
            first, *further = _accepted([failed[slot]] if slot in failed else of_slot, drafts.get(slot, ()))
            result.sampled[slot] = first
            if slot in drafts:
                result.further[slot] = further
            if len(further) + 1 < length:
                self._rollback.rollback(slot, sequences[slot])


def _rows(sequence: RunningSequence, number: int) -> list[SampledRow]:
    """The next `number` rows of a text. Between them only the position changes, since there are no penalties."""
    params, counts, position = sequence.params, sequence.generated_counts, sequence.position
    later = [
        SamplingRow(params=params, position=position + offset, generated_counts=counts) for offset in range(1, number)
    ]
    return [sequence, *later]


def _accepted(sampled: list[Sampled], drafts: Sequence[int]) -> list[Sampled]:
    """`sampled` up to the first token that differs from its draft; sampled[i + 1] was sampled after drafts[i]."""
    for index, draft in enumerate(drafts[: len(sampled)]):
        token = sampled[index]
        if not isinstance(token, SampledToken) or token.token_id != draft:
            return sampled[: index + 1]
    return sampled


def _ready(plan: Plan, sequences: Mapping[int, RunningSequence]) -> list[int]:
    """The slots that have read all their text; slots of one token first, in the order in which they are read."""
    last = [chunk for chunk in plan.prefill if _ends_text(chunk, sequences)]
    if not last:
        return list(plan.decode)
    single = [chunk.slot for chunk in last if chunk.length == 1]
    return [*sorted((*plan.decode, *single)), *(chunk.slot for chunk in last if chunk.length > 1)]


def _ends_text(chunk: Chunk, sequences: Mapping[int, RunningSequence]) -> bool:
    return chunk.start + chunk.length == len(sequences[chunk.slot].read_ids)
