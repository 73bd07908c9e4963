"""Drives a model in an evaluation: mode and precision, and long texts in segments."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nsm_core.execution.base import SequenceModel
from nsm_core.state.spec import State

# Of the states of a batch together: rows of a model with a large state are fewer.
_STATE_BUDGET_BYTES = 8 << 30
# Positions whose logits are in memory at once: 128 MB in fp32 at 8,192 tokens.
_LOGITS_POSITIONS = 4096


class EvaluatedModel(SequenceModel, Protocol):
    """A model that can be served, as a torch module."""

    training: bool

    def train(self, mode: bool = True) -> object: ...

    def named_modules(self) -> Iterable[tuple[str, nn.Module]]: ...


def device_of(model: SequenceModel) -> torch.device:
    """Where the model's states live."""
    return next(iter(model.initial_state(1).values())).device


@contextlib.contextmanager
def reading(model: EvaluatedModel, *, autocast: bool = False) -> Iterator[torch.device]:
    """Evaluation mode without gradients, in bf16 if `autocast`; the old mode is restored afterwards."""
    was_training = model.training
    model.train(False)
    try:
        with torch.inference_mode():
            device = device_of(model)
            precision = torch.autocast(device.type, torch.bfloat16) if autocast else contextlib.nullcontext()
            with precision:
                yield device
    finally:
        model.train(was_training)


def read_in_segments(model: SequenceModel, ids: Tensor, state: State, segment_len: int) -> tuple[Tensor, State]:
    """ids [B,T] -> hidden [B,d] after the last token and the state; activations of one segment exist at a time."""
    hidden = torch.empty(0)
    for segment in torch.split(ids, segment_len, dim=1):
        hidden, state = model.forward(segment, state)
    return hidden[:, -1], state


def rows_that_fit(model: SequenceModel, requested: int) -> int:
    """At most `requested` rows, fewer when their states would take too much memory."""
    return max(1, min(requested, _STATE_BUDGET_BYTES // (4 * model.state_spec.num_bytes)))


def token_losses(model: SequenceModel, hidden: Tensor, targets: Tensor) -> Tensor:
    """hidden [N, d], targets [N] -> nats [N] fp32; the logits exist in pieces only."""
    pieces = zip(torch.split(hidden, _LOGITS_POSITIONS), torch.split(targets, _LOGITS_POSITIONS), strict=True)
    return torch.cat([F.cross_entropy(model.logits(part), wanted, reduction="none") for part, wanted in pieces])


def sequence_losses(model: SequenceModel, ids: Tensor, state: State) -> Tensor:
    """ids [B, N + 1] that follow on `state` -> nats [B, N] of the last N."""
    hidden, _ = model.forward(ids[:, :-1], state)
    return token_losses(model, hidden.flatten(0, 1), ids[:, 1:].flatten()).view(len(ids), -1)
