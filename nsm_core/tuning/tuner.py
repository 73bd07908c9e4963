"""The training of a start state: Adam on its slots or matrices, with a held-out loss that decides when to stop.

Every batch follows from the seed and the number of the step, so that a run that goes on from a checkpoint ends with the
numbers of one that was never interrupted, on the same device.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from nsm_core.errors import NumericalError
from nsm_core.loaded_model import LoadedModel, SequenceModel
from nsm_core.rwkv7.chunked_scan import state_scan_chunked
from nsm_core.rwkv7.model import Rwkv7Model
from nsm_core.state.plausible import MAX_MAGNITUDE
from nsm_core.state.spec import State
from nsm_core.tuning.adam import Adam
from nsm_core.tuning.checkpoint import Checkpoint
from nsm_core.tuning.config import TuneConfig
from nsm_core.tuning.examples import Example
from nsm_core.tuning.loss import mean_loss, num_targets, rows_of, split_by_tokens, summed_loss
from nsm_core.tuning.start import after_start_token, largest_magnitude, trained_names


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """At a held-out loss: `step` of `num_steps` are done. Losses are nats a target token. `train_loss`: the mean since
    the report before, None at the start. `start_loss`: held out, of the model as it was. `best_step`, `best_loss`: of
    the held-out losses so far, that of step 0 among them. `num_tokens`: that were read in training.
    """

    step: int
    num_steps: int
    train_loss: float | None
    held_out_loss: float
    start_loss: float
    best_step: int
    best_loss: float
    num_tokens: int
    is_last: bool


class Tuner:
    """One run. `start`: the state [1, *shape] to begin from; None: that of a text without anything read."""

    def __init__(
        self,
        loaded: LoadedModel[SequenceModel],
        config: TuneConfig,
        train: Sequence[Example],
        held_out: Sequence[Example],
        *,
        start: State | None = None,
    ) -> None:
        self._model = loaded.model
        self._device = loaded.device
        self._config = config
        self._train, self._held_out = list(train), list(held_out)
        if isinstance(loaded.model, Rwkv7Model):
            loaded.model.scan = state_scan_chunked
        begin = after_start_token(loaded) if start is None else start
        names = trained_names(self._model.state_spec)
        self._fixed = {name: value for name, value in begin.items() if name not in names}
        self._tuned = {name: begin[name].detach().clone().requires_grad_() for name in names}
        self._adam = Adam(list(self._tuned.values()))
        self._best = self._copy()
        self._step = self._num_tokens = self._num_worse = self._best_step = 0
        self._best_loss = self._start_loss = math.inf
        self._losses: list[float] = []

    @property
    def num_steps(self) -> int:
        return self._config.num_steps(len(self._train))

    @property
    def num_parameters(self) -> int:
        return sum(value.numel() for value in self._tuned.values())

    def run(self, keep: Callable[[Checkpoint], None] = lambda checkpoint: None) -> Iterator[Report]:
        """Trains to the end, with a report at each held-out loss, the first before any step. `keep` gets what
        `restore` takes, at each report but the last.

        Raises NumericalError when the numbers of the state leave the range of states.
        """
        if self._step == 0:
            yield self._report()
        between = self._config.steps_between(len(self._train))
        while self._step < self.num_steps and self._num_worse < self._config.patience:
            self._take_step()
            if self._step % between == 0 or self._step == self.num_steps:
                report = self._report()
                if not report.is_last:
                    keep(self.checkpoint())
                yield report

    def best_state(self) -> State:
        """The state [1, *shape] of the best held-out loss."""
        return {**self._fixed, **self._best}

    def checkpoint(self) -> Checkpoint:
        tensors = {f"best.{name}": value for name, value in self._best.items()}
        tensors |= {f"tuned.{name}": value.detach().clone() for name, value in self._tuned.items()}
        for name, first, second in zip(self._tuned, self._adam.first, self._adam.second, strict=True):
            tensors |= {f"first.{name}": first.clone(), f"second.{name}": second.clone()}
        return Checkpoint(
            step=self._step,
            num_tokens=self._num_tokens,
            num_worse=self._num_worse,
            best_step=self._best_step,
            best_loss=self._best_loss,
            start_loss=self._start_loss,
            tensors=tensors,
        )

    def restore(self, checkpoint: Checkpoint) -> None:
        """Goes on where a run with the same model, config and examples was."""
        for name in self._tuned:
            with torch.no_grad():
                self._tuned[name].copy_(checkpoint.tensors[f"tuned.{name}"])
        for index, name in enumerate(self._tuned):
            self._adam.first[index].copy_(checkpoint.tensors[f"first.{name}"])
            self._adam.second[index].copy_(checkpoint.tensors[f"second.{name}"])
        self._best = {name: checkpoint.tensors[f"best.{name}"].to(self._device) for name in self._tuned}
        self._step = self._adam.num_steps = checkpoint.step
        self._num_tokens = checkpoint.num_tokens
        self._num_worse, self._best_step = checkpoint.num_worse, checkpoint.best_step
        self._best_loss, self._start_loss = checkpoint.best_loss, checkpoint.start_loss

    def _copy(self) -> dict[str, Tensor]:
        return {name: value.detach().clone() for name, value in self._tuned.items()}

    def _take_step(self) -> None:
        batch = self._config.batch(self._train, self._step)
        count, loss = num_targets(batch), 0.0
        for group in split_by_tokens(batch, self._config.max_tokens_at_once):
            part = summed_loss(self._model, {**self._fixed, **self._tuned}, rows_of(group, self._device)) / count
            part.backward()  # type: ignore[no-untyped-call]
            loss += float(part.detach())
        if not math.isfinite(loss):
            raise NumericalError(f"the loss of step {self._step + 1} is not finite: a lower rate may help")
        self._adam.step(self._config.rate_at(self._step, self.num_steps))
        if not largest_magnitude(self._tuned) <= MAX_MAGNITUDE:
            raise NumericalError(f"the state grew too large in step {self._step + 1}: a lower rate may help")
        self._step += 1
        self._num_tokens += sum(len(example.ids) for example in batch)
        self._losses.append(loss)

    def _report(self) -> Report:
        loss = mean_loss(
            self._model,
            {**self._fixed, **self._copy()},
            self._held_out,
            device=self._device,
            max_tokens=self._config.max_tokens_at_once,
        )
        if self._step == 0:
            self._start_loss = loss
        if loss < self._best_loss:
            self._best, self._best_loss, self._best_step, self._num_worse = self._copy(), loss, self._step, 0
        else:
            self._num_worse += 1
        train_loss = sum(self._losses) / len(self._losses) if self._losses else None
        self._losses = []
        return Report(
            step=self._step,
            num_steps=self.num_steps,
            train_loss=train_loss,
            held_out_loss=loss,
            start_loss=self._start_loss,
            best_step=self._best_step,
            best_loss=self._best_loss,
            num_tokens=self._num_tokens,
            is_last=self._step == self.num_steps or self._num_worse >= self._config.patience,
        )
