"""How likely a model finds the completions of examples that it reads after a state."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from nsm_core.loaded_model import SequenceModel
from nsm_core.state.spec import State
from nsm_core.tuning.examples import Example
from nsm_core.tuning.start import for_rows


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Examples side by side. ids [B,T] int64, right-padded to `lengths` [B]; is_target [B,T] bool."""

    ids: Tensor
    lengths: Tensor
    is_target: Tensor


def rows_of(examples: Sequence[Example], device: torch.device) -> Rows:
    longest = max(len(example.ids) for example in examples)
    ids = torch.zeros(len(examples), longest, dtype=torch.int64)
    is_target = torch.zeros(len(examples), longest, dtype=torch.bool)
    for row, example in enumerate(examples):
        ids[row, : len(example.ids)] = torch.tensor(example.ids)
        is_target[row, list(example.targets)] = True
    lengths = torch.tensor([len(example.ids) for example in examples])
    return Rows(ids=ids.to(device), lengths=lengths.to(device), is_target=is_target.to(device))


def split_by_tokens(examples: Sequence[Example], max_tokens: int) -> Iterator[list[Example]]:
    """Groups of examples of like length with at most `max_tokens`, padding included; one example always fits."""
    group: list[Example] = []
    for example in sorted(examples, key=lambda one: (len(one.ids), one.line)):
        if group and (len(group) + 1) * len(example.ids) > max_tokens:
            yield group
            group = []
        group.append(example)
    if group:
        yield group


def summed_loss(model: SequenceModel, state: State, rows: Rows) -> Tensor:
    """The negative log-likelihood of all targets in nats, fp32 []. `state`: [1, *shape], that every row starts from."""
    hidden, _ = model.forward(rows.ids[:, :-1], for_rows(state, len(rows.ids)), (rows.lengths - 1).clamp(min=0))
    is_target = rows.is_target[:, 1:]
    # logits of a vocabulary take most of the memory: only those of targets are made
    logits = model.logits(hidden[is_target])
    return F.cross_entropy(logits, rows.ids[:, 1:][is_target], reduction="sum")


def num_targets(examples: Sequence[Example]) -> int:
    return sum(len(example.targets) for example in examples)


@torch.no_grad()
def mean_loss(
    model: SequenceModel, state: State, examples: Sequence[Example], *, device: torch.device, max_tokens: int
) -> float:
    """Nats for each target token of all examples."""
    total = sum(
        float(summed_loss(model, state, rows_of(group, device))) for group in split_by_tokens(examples, max_tokens)
    )
    return total / num_targets(examples)
