"""A model on an executor, as the measurements read models: so any architecture can be measured, and the numbers that a
server computes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from nsm_core.execution.base import Executor
from nsm_core.state.spec import State, StateSpec


class ExecutedModel:
    """An EvaluatedModel. Rows of a batch are read in the executor's pool, as many at a time as it has."""

    training = False

    def __init__(self, executor: Executor, spec: StateSpec) -> None:
        self._executor, self.state_spec = executor, spec

    def train(self, mode: bool = True) -> object:
        """Executors have one mode."""
        return self

    def named_modules(self) -> Iterable[tuple[str, nn.Module]]:
        """None: what is inside of an executor is its own."""
        return ()

    def initial_state(self, batch_size: int) -> State:
        return {name: value.expand(batch_size, *value.shape[1:]) for name, value in self._executor.initial.items()}

    def forward(self, ids: Tensor, state: State, lengths: Tensor | None = None) -> tuple[Tensor, State]:
        """As SequenceModel; a row of length 0 retains its state."""
        ends = [ids.shape[1]] * len(ids) if lengths is None else lengths.tolist()
        texts = [row[:end] for row, end in zip(ids.tolist(), ends, strict=True)]
        parts = [self._read(texts[rows], _rows(state, rows)) for rows in self._groups(len(ids))]
        hidden = torch.nn.utils.rnn.pad_sequence([one for read, _ in parts for one in read], batch_first=True)
        missing = ids.shape[1] - hidden.shape[1]
        return nn.functional.pad(hidden, (0, 0, 0, missing)), _joined([end for _, end in parts])

    def step(self, ids: Tensor, state: State) -> tuple[Tensor, State]:
        hidden, state = self.forward(ids[:, None], state)
        return hidden[:, 0], state

    def logits(self, hidden: Tensor) -> Tensor:
        flat = self._executor.logits(hidden.reshape(-1, hidden.shape[-1]))
        return flat.view(*hidden.shape[:-1], -1)

    def _groups(self, num_rows: int) -> Iterator[slice]:
        most = self._executor.pool.num_rows
        return (slice(at, at + most) for at in range(0, num_rows, most))

    def _read(self, texts: Sequence[list[int]], state: State) -> tuple[list[Tensor], State]:
        """hidden [length, d] of each, and the states after them."""
        pool, rows = self._executor.pool, list(range(len(texts)))
        for row in rows:
            pool.lease(row)
        try:
            pool.scatter(rows, state)
            read = [row for row in rows if texts[row]]
            found = self._executor.read(read, [texts[row] for row in read]) if read else []
            after = {name: value.clone() for name, value in pool.gather(rows).items()}
        finally:
            for row in rows:
                pool.free(row)
        hidden = dict(zip(read, found, strict=True))
        nothing = found[0][:0] if found else torch.zeros(0, 1)
        return [hidden.get(row, nothing) for row in rows], after


def _rows(state: State, rows: slice) -> State:
    return {name: value[rows] for name, value in state.items()}


def _joined(states: Sequence[State]) -> State:
    return {name: torch.cat([state[name] for state in states]) for name in states[0]}
