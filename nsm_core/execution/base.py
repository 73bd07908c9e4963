"""How an engine runs a model: the seam between what is decided (requests, batches) and a device's way to compute it."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from nsm_core.sampling.sampler import Draw
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


class Savepoint(Protocol):
    """What a row of a pool held."""

    def restore(self) -> None:
        """The row holds it again, to the bit. Once, before anybody else uses the row."""
        ...


class TakeSavepoint(Protocol):
    def __call__(self, row: int, num_tokens: int, /) -> Savepoint:
        """Before a leased row reads up to `num_tokens` that may be taken back."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class Upcoming:
    """What R rows read in a step that is launched while the ids which the step before sampled are still on the device.

    Row i reads the id sampled[sources[i]] (`sampled` [N] int64, there), unless it is NOT_FINITE or one that the row
    pauses at: then nothing of the row is touched and its hidden vector means nothing. Where sources[i] is negative the
    row reads ids[i], whatever it is. Both are [R] int64.
    """

    ids: npt.NDArray[np.int64]
    sources: npt.NDArray[np.int64]
    sampled: Tensor | None


class LookAhead(Protocol):
    """How a device is given a step more than is waited for. It computes in the order of the calls."""

    @property
    def min_rows(self) -> int:
        """With fewer rows a step is over before Python is done with the last one: to look ahead does not pay."""
        ...

    def pause_at(self, row: int, ids: Collection[int]) -> None:
        """From the next call of `step` on the row pauses at these ids, instead of those given before."""
        ...

    def step(self, rows: Sequence[int], upcoming: Upcoming) -> Tensor:
        """`Executor.step` with ids that are not known yet, without waiting for the device: hidden [len(rows), d]."""
        ...

    def beside(self) -> AbstractContextManager[object]:
        """Within it rows are read from the pool without waiting for steps in flight; none of these may touch them."""
        ...


class Executor(Protocol):
    """A model on the rows of a pool that it owns: rows advance in place. Not thread-safe; inference only.

    Rows are leased from `pool` by the caller, distinct, and given in rising order.
    """

    @property
    def pool(self) -> StatePool:
        """The states of the running sequences."""
        ...

    @property
    def initial(self) -> State:
        """The start of a sequence, tensors [1, *shape]; not to be modified."""
        ...

    def step(self, rows: Sequence[int], ids: Sequence[int]) -> Tensor:
        """Row rows[i] reads the token ids[i]: hidden [len(rows), d]."""
        ...

    def read(self, rows: Sequence[int], ids: Sequence[Sequence[int]]) -> list[Tensor]:
        """Row rows[i] reads all of ids[i], at least one token: hidden [len(ids[i]), d] of each."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [n, d] -> logits [n, V] fp32."""
        ...

    @property
    def draw(self) -> Draw:
        """How tokens are drawn from logits that are on the host."""
        ...

    @property
    def prompt_unit(self) -> int:
        """A row's bits depend on where its prompt is cut, unless cuts lie this many tokens, or a multiple, apart.

        1: they never do, or always.
        """
        ...

    @property
    def savepoint(self) -> TakeSavepoint | None:
        """How drafts of tokens are taken back; None: none may be tried.

        An executor that has it gives hidden, logits and states the same bits however a text is cut into calls: after
        drafts that come true they are those of single steps.
        """
        ...

    @property
    def look_ahead(self) -> LookAhead | None:
        """How a step is launched before the one before it is over; None: every step is waited for.

        An executor that has it does not wait for the device in `read` and `logits` either.
        """
        ...


class ExecutorFactory(Protocol):
    """Makes the executor of one engine."""

    def __call__(self, model: SequenceModel, *, num_rows: int, poison: bool) -> Executor:
        """`num_rows`: states that run at a time; `poison`: free rows are filled with NaN."""
        ...
