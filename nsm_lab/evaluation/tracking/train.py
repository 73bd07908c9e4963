"""Trains one small model on one task and tests it on longer strings."""

from __future__ import annotations

import dataclasses
import time

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nsm_core.model.nsm import NsmModel
from nsm_core.model.router import Router
from nsm_lab.evaluation.mqar.train import lr_factor
from nsm_lab.evaluation.tracking.layers import model_config, register_layers
from nsm_lab.evaluation.tracking.tasks import NOT_ASKED, TASKS, TrackingTask

MULTIPLES = (1, 2, 4)  # of the longest string of training
TEST_ROWS = 128
SHORTEST = 2
CHECK_EVERY = 100  # steps
SOLVED = 0.999  # accuracy at every length
LOW_LOSS = 0.01  # nats; above it nothing is solved, and tests would be for nothing


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrackingRun:
    """One training. Strings grow to their full length over the first half of the steps."""

    task: str
    layer: str
    lr: float
    seed: int = 0
    steps: int = 1500
    rows: int = 32  # strings a step
    num_layers: int = 1
    weight_decay: float = 0.01
    warmup: float = 0.05
    clip: float = 1.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrackingOutcome:
    """`accuracies`: by MULTIPLES, the share of right answers. In running tasks the second half of a string counts,
    at the length of training all of it. `train_loss`: mean of the last steps, nats."""

    accuracies: tuple[float, ...]
    train_loss: float
    steps_run: int
    num_parameters: int
    cpu_s: float


def train(run: TrackingRun) -> TrackingOutcome:
    """Trains until the steps are over or every length is solved."""
    register_layers()
    torch.manual_seed(run.seed)
    task = TASKS[run.task]
    model = NsmModel(model_config(run.layer, task.num_tokens, run.num_layers))
    optimizer = torch.optim.AdamW(model.parameters(), lr=run.lr, betas=(0.9, 0.98), weight_decay=run.weight_decay)
    started, losses, step = time.process_time(), list[float](), 0
    rng = np.random.default_rng((run.seed, 0))
    for step in range(1, run.steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = run.lr * lr_factor(step / run.steps, run.warmup)
        losses.append(_train_step(model, optimizer, _batch(task, rng, run.rows, _length(run, step, rng)), run.clip))
        if step % CHECK_EVERY == 0 and losses[-1] < LOW_LOSS and min(measure(model, task, run.seed)) >= SOLVED:
            break
    return TrackingOutcome(
        accuracies=measure(model, task, run.seed),
        train_loss=float(np.mean(losses[-CHECK_EVERY:])),
        steps_run=step,
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        cpu_s=time.process_time() - started,
    )


def _length(run: TrackingRun, step: int, rng: np.random.Generator) -> int:
    longest = TASKS[run.task].length
    reached = SHORTEST + (longest - SHORTEST) * min(1.0, 2.0 * step / run.steps)
    return int(rng.integers(SHORTEST, int(reached) + 1))


def _batch(task: TrackingTask, rng: np.random.Generator, rows: int, length: int) -> tuple[Tensor, Tensor]:
    tokens, targets = task.make(rng, rows, length)
    return torch.from_numpy(tokens), torch.from_numpy(targets)


def _train_step(model: NsmModel, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor], clip: float) -> float:
    model.train()
    loss = F.cross_entropy(_logits(model, batch[0]).flatten(0, 1), batch[1].flatten(), ignore_index=NOT_ASKED)
    torch.autograd.backward(loss)
    nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for module in model.modules():
        if isinstance(module, Router):
            module.rescue_dead_slots()
    return float(loss.detach())


def _logits(model: NsmModel, tokens: Tensor) -> Tensor:
    hidden, _ = model.read(tokens, model.initial_state(len(tokens)), is_fresh=True)
    return model.logits(hidden)


@torch.no_grad()
def measure(model: NsmModel, task: TrackingTask, seed: int) -> tuple[float, ...]:
    """Accuracies by MULTIPLES, on strings of their own."""
    model.eval()
    accuracies = []
    for multiple in MULTIPLES:
        length = multiple * task.length
        tokens, targets = _batch(task, np.random.default_rng((seed, 1, multiple)), TEST_ROWS, length)
        first = length // 2 if task.is_running and multiple > 1 else 0
        counted = targets[:, first:]
        right = _logits(model, tokens)[:, first:].argmax(dim=-1) == counted
        accuracies.append(float(right[counted != NOT_ASKED].float().mean()))
    return tuple(accuracies)


def constant_accuracies(task: TrackingTask, seed: int = 0) -> tuple[float, ...]:
    """What the most frequent answer scores by MULTIPLES."""
    accuracies = []
    for multiple in MULTIPLES:
        length = multiple * task.length
        _, targets = task.make(np.random.default_rng((seed, 1, multiple)), TEST_ROWS, length)
        counted = targets[:, length // 2 if task.is_running and multiple > 1 else 0 :]
        answers = counted[counted != NOT_ASKED]
        accuracies.append(float(np.bincount(answers).max() / answers.size))
    return tuple(accuracies)
