"""The seam between the engine's decisions (requests, batches) and the computation on a device."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from nsm_core.loaded_model import SequenceModel as SequenceModel  # part of this seam, defined below the models
from nsm_core.sampling.device import PendingTokens
from nsm_core.sampling.masks import MaskLogits
from nsm_core.sampling.sampler import Draw
from nsm_core.state.pool import StatePool
from nsm_core.state.spec import State


class Savepoint(Protocol):
    """The state of a pool's row at one moment."""

    def restore(self) -> None:
        """Writes it back, to the bit. Once, before the row is used for another sequence."""
        ...


class TakeSavepoint(Protocol):
    def __call__(self, row: int, num_tokens: int, /) -> Savepoint:
        """Before a leased row reads up to `num_tokens` that may be rolled back."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class NextInputs:
    """The ids of R rows in a step that is launched while the ids sampled by the step before are still on the device.

    Row i reads the id sampled[sources[i]] (`sampled` [N] int64, on the device), unless it is NOT_FINITE or a pausing id
    of the row: then the row is skipped and its hidden vector is undefined. If sources[i] is negative the row reads
    ids[i]. Both are [R] int64.
    """

    ids: npt.NDArray[np.int64]
    sources: npt.NDArray[np.int64]
    sampled: Tensor | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DecodeInputs:
    """What R rows decode: row i reads ids[i] [R] int32, then each token that it draws.

    `choices` [R, 7] int64: `pack_sampling_params` of each row, with the position of its first token. `end_ids`: of each
    row; `most_rounds`: at least one; `seconds`: of the whole call; `interrupt` [1] int32: another thread ends it.
    """

    ids: npt.NDArray[np.int32]
    choices: npt.NDArray[np.int64]
    end_ids: Sequence[frozenset[int]]
    most_rounds: int
    seconds: float
    interrupt: npt.NDArray[np.int32]


@dataclasses.dataclass(frozen=True, slots=True)
class Rounds:
    """What R rows sample in `number` rounds of one launch: each of them the token after its first id, then the token
    after that, until it draws a pausing id or is not finite, and at most limits[i] tokens.

    `choices` [R, 7] int64: `pack_sampling_params` of each row, with the position of its first token. `limits` [R]
    int64, at least 1.
    """

    choices: npt.NDArray[np.int64]
    limits: npt.NDArray[np.int64]
    number: int


class DecodeRounds(Protocol):
    def __call__(self, rows: Sequence[int], inputs: DecodeInputs, /) -> npt.NDArray[np.int64]:
        """Several steps and draws in one call: tokens [rounds, R], NOT_FINITE for a row whose logits are not finite.

        The tokens and states of plain steps, to the bit. The last round is the first in which a row draws one of its
        end ids or is not finite, after which `interrupt` is set, or whose successor would end after `seconds`.
        """
        ...


class PrepareMore(Protocol):
    def __call__(self) -> bool:
        """Prepares one more thing that calls would otherwise prepare when they need it; False: nothing is left."""
        ...


class Overlap(Protocol):
    """Launches steps without waiting for the ones before. The device computes them in the order of the calls."""

    @property
    def min_rows(self) -> int:
        """With fewer rows overlap does not pay: the device would wait for Python anyway."""
        ...

    def pause_at(self, row: int, ids: Collection[int]) -> None:
        """Sets the row's pausing ids, from the next call of `step` on."""
        ...

    def step(self, rows: Sequence[int], inputs: NextInputs) -> Tensor:
        """`Executor.step` with ids that are still on the device, without waiting: hidden [len(rows), d]."""
        ...

    def most_rounds(self, num_rows: int) -> int:
        """Of a call of `decode` with so many rows; 0: it is impossible."""
        ...

    def decode(self, rows: Sequence[int], inputs: NextInputs, rounds: Rounds) -> PendingTokens:
        """`step` and the choice of a token, several times, without waiting. The ids and states of plain steps, to the
        bit; SKIPPED where a row takes no part. The result's `ids` are those of the last round, and are overwritten by
        the next call.
        """
        ...

    def side_stream(self) -> AbstractContextManager[object]:
        """A context for reading rows of the pool without waiting for steps in flight, which must not touch the rows."""
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
        """Draws tokens from logits on the host."""
        ...

    @property
    def mask(self) -> MaskLogits:
        """Makes tokens impossible in logits on the host."""
        ...

    @property
    def prompt_unit(self) -> int:
        """Prompts must be cut at multiples of so many tokens, so that a row's bits do not depend on the cuts.

        1: any cut gives the same bits, or no rule would.
        """
        ...

    @property
    def reads_ragged(self) -> bool:
        """Whether `read` takes rows of any lengths without padding: then decoding rows and prompts share one call.

        Only for executors whose bits do not depend on the cuts of a text.
        """
        ...

    @property
    def savepoint(self) -> TakeSavepoint | None:
        """Takes savepoints for the rollback of drafts; None: no tokens may be drafted.

        An executor with savepoints computes hidden vectors, logits and states with the same bits however a text is cut
        into calls. So accepted drafts leave the bits of single steps.
        """
        ...

    @property
    def decode_rounds(self) -> DecodeRounds | None:
        """Decodes plain rows several tokens at a time; None: Python is asked for every token."""
        ...

    @property
    def overlap(self) -> Overlap | None:
        """Launches steps without waiting; None: every step is waited for.

        An executor with overlap does not wait for the device in `read` and `logits` either.
        """
        ...

    @property
    def prepare_more(self) -> PrepareMore | None:
        """What its start has left for later, in parts of some milliseconds, between other calls; None: nothing."""
        ...


class ExecutorFactory(Protocol):
    """Makes the executor of one engine."""

    def __call__(self, model: SequenceModel, *, num_rows: int, poison: bool) -> Executor:
        """`num_rows`: states that run at a time; `poison`: free rows are filled with NaN."""
        ...
