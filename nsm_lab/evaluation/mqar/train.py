"""Trains a small model on associative recall and tests it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import sys
import time
from collections.abc import Iterator, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from nsm_core.execution.devices import resolve_device
from nsm_core.model.nsm import NsmModel
from nsm_core.model.router import Router
from nsm_lab.baselines.register import register_baselines
from nsm_lab.evaluation.devices import resolve_precision
from nsm_lab.evaluation.mqar.config import MqarConfig
from nsm_lab.evaluation.mqar.data import TEST_TASKS, TRAIN_TASKS, Task, generate
from nsm_lab.evaluation.mqar.report import Accuracy, Epoch, MqarReport, count_state
from nsm_lab.provenance import command_line, source_commit, utc_now, versions

# Test sequences side by side: the longest have 1,024 tokens.
_TEST_TOKENS = 1 << 16
_SETTINGS = ("batch", "epochs", "lr", "weight_decay", "warmup", "clip", "target", "time_limit_s", "seed", "compile")


@dataclasses.dataclass(frozen=True, slots=True)
class Batch:
    """Sequences on the device; see Examples."""

    ids: Tensor  # [B, T]
    positions: Tensor  # [B, pairs]
    values: Tensor  # [B, pairs]


def query_logits(model: NsmModel, batch: Batch) -> Tensor:
    """Logits [B, pairs, V] where a key is repeated, each sequence read from the start."""
    hidden, _ = model.read(batch.ids, model.initial_state(len(batch.ids)), is_fresh=True)
    return model.logits(hidden.gather(1, batch.positions[..., None].expand(-1, -1, hidden.shape[-1])))


def recall_loss(model: NsmModel, batch: Batch) -> Tensor:
    """Mean over the queries in nats."""
    return F.cross_entropy(query_logits(model, batch).flatten(0, 1), batch.values.flatten())


def build_model(config: MqarConfig) -> NsmModel:
    """A model with fresh weights. Without `mlp`, feed-forward layers are zero and stay so."""
    register_baselines()
    torch.manual_seed(config.seed)
    model = NsmModel(config.model)
    if not config.mlp:
        for name, parameter in model.named_parameters():
            if ".mlp." in name or ".mlp_norm." in name:
                nn.init.zeros_(parameter)
                parameter.requires_grad_(False)
    return model


class Recall:
    """One run: the data on the device, the model, its optimiser."""

    def __init__(self, config: MqarConfig) -> None:
        self.config, self.device = config, resolve_device(config.device)
        self.precision = resolve_precision(config.precision, self.device)
        self.train_sets = self._generate(config.train_tasks, seed=(config.seed, 0))
        self.test_sets = self._generate(config.test_tasks, seed=(config.seed, 1))
        self.model = build_model(config).to(self.device)
        self.loss = torch.compile(recall_loss, dynamic=False) if config.compile else recall_loss
        self.optimizer = _optimizer(self.model, config)
        self.steps_per_epoch = sum(-(-len(batch.ids) // config.batch) for batch in self.train_sets)

    def _generate(self, tasks: tuple[Task, ...], seed: tuple[int, int]) -> list[Batch]:
        vocab_size = self.config.model.vocab_size
        return [_on_device(task, (*seed, number), vocab_size, self.device) for number, task in enumerate(tasks)]

    def run(self) -> MqarReport:
        """Trains until the epochs, the time or the target is reached, and tests after every epoch."""
        started, history = time.monotonic(), list[Epoch]()
        for number in range(self.config.epochs):
            loss = self._train_epoch(number, started)
            accuracies = self.test()
            history.append(Epoch(number + 1, loss, mean_accuracy(accuracies), time.monotonic() - started))
            last = history[-1]
            line = f"epoch {last.number}: loss {loss:.4f}, test mean {last.test_mean:.4f}, {last.elapsed_s:.0f} s"
            tqdm.write(line, file=sys.stderr)
            if last.test_mean >= self.config.target or self._progress(number + 1, 0, started) >= 1.0:
                break
        return self.report(accuracies, history)

    def _progress(self, epoch: int, step: int, started: float) -> float:
        """Share of the run that is done, by steps or by time, whichever is further."""
        by_steps = (epoch + step / self.steps_per_epoch) / self.config.epochs
        limit = self.config.time_limit_s
        return by_steps if limit is None else max(by_steps, (time.monotonic() - started) / limit)

    def _train_epoch(self, epoch: int, started: float) -> float:
        """One pass in a new order; returns the mean loss. Ends early when the time is over."""
        self.model.train()
        total, count = torch.zeros((), device=self.device), 0
        for batch in tqdm(
            self._batches(epoch), total=self.steps_per_epoch, desc=f"epoch {epoch + 1}", leave=False, disable=None
        ):
            progress = self._progress(epoch, count, started)
            if progress >= 1.0:
                break
            total += self.train_step(batch, progress)
            count += 1
        return float(total) / max(1, count)

    def order(self, epoch: int) -> list[tuple[int, int]]:
        """The batches of a pass as (task, first sequence): every training sequence once, a batch of one task."""
        size = self.config.batch
        starts = [
            (number, first) for number, data in enumerate(self.train_sets) for first in range(0, len(data.ids), size)
        ]
        return [starts[index] for index in np.random.default_rng((self.config.seed, 2, epoch)).permutation(len(starts))]

    def _batches(self, epoch: int) -> Iterator[Batch]:
        for number, first in self.order(epoch):
            yield rows_of(self.train_sets[number], slice(first, first + self.config.batch))

    def train_step(self, batch: Batch, progress: float) -> Tensor:
        """One update at the learning rate of `progress` in [0, 1]; returns the loss."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.lr * lr_factor(progress, self.config.warmup)
        return self.update(batch)

    def update(self, batch: Batch) -> Tensor:
        """One update at the optimiser's learning rates; returns the loss. Waits for nothing on the device."""
        with self._autocast():
            loss: Tensor = self.loss(self.model, batch)
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        for module in self.model.modules():
            if isinstance(module, Router):
                module.rescue_dead_slots()
        return loss.detach()

    @torch.no_grad()
    def test(self) -> tuple[Accuracy, ...]:
        """Share of right answers, task by task."""
        self.model.eval()
        accuracies = []
        for task, data in zip(self.config.test_tasks, self.test_sets, strict=True):
            rows, right = max(1, _TEST_TOKENS // task.length), torch.zeros((), device=self.device)
            for first in range(0, len(data.ids), rows):
                batch = rows_of(data, slice(first, first + rows))
                with self._autocast():
                    right += (query_logits(self.model, batch).argmax(dim=-1) == batch.values).sum()
            accuracies.append(_accuracy(task, float(right)))
        return tuple(accuracies)

    def _autocast(self) -> contextlib.AbstractContextManager[object]:
        is_bf16 = self.precision == "bf16"
        return torch.autocast(torch.device(self.device).type, torch.bfloat16, enabled=is_bf16)

    def report(self, accuracies: tuple[Accuracy, ...], history: Sequence[Epoch]) -> MqarReport:
        config = self.config
        return MqarReport(
            model=dataclasses.asdict(config.model),
            has_mlp=config.mlp,
            num_parameters=sum(value.numel() for value in self.model.parameters() if value.requires_grad),
            **count_state(self.model.state_spec),
            settings={**{name: getattr(config, name) for name in _SETTINGS}, "precision": self.precision},
            accuracies=accuracies,
            test_mean=mean_accuracy(accuracies),
            history=tuple(history),
            device=torch.cuda.get_device_name(self.device) if self.device.startswith("cuda") else self.device,
            command=command_line(),
            commit=source_commit(),
            versions=versions(),
            created=utc_now(),
        )


@functools.lru_cache(maxsize=len(TRAIN_TASKS) + len(TEST_TASKS))
def _on_device(task: Task, seed: tuple[int, ...], vocab_size: int, device: str) -> Batch:
    """Kept, because runs in one process often have the same examples. On the device when this returns."""
    examples = generate(task, np.random.default_rng(seed), vocab_size)
    arrays = (examples.ids, examples.positions, examples.values)
    batch = Batch(*(torch.from_numpy(array.astype(np.int32)).to(device) for array in arrays))
    if batch.ids.is_cuda:
        torch.cuda.current_stream(device).synchronize()
    return batch


def lr_factor(progress: float, warmup: float) -> float:
    """Share of the peak learning rate: a linear rise, then half a cosine to zero."""
    if progress < warmup:
        return max(progress / warmup, 1e-3)
    return 0.5 * (1.0 + math.cos(math.pi * min(1.0, (progress - warmup) / max(1e-9, 1.0 - warmup))))


def _optimizer(model: NsmModel, config: MqarConfig) -> torch.optim.Optimizer:
    """AdamW; only the projections of the mixers and of the feed-forward layers decay."""
    named = [(name, value) for name, value in model.named_parameters() if value.requires_grad]
    endings = ("project.weight", "out.weight", "up.weight", "down.weight")
    groups = [
        {"params": [value for name, value in named if name.endswith(endings)], "weight_decay": config.weight_decay},
        {"params": [value for name, value in named if not name.endswith(endings)], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.lr, betas=(0.9, 0.98), fused=next(model.parameters()).is_cuda)


def rows_of(batch: Batch, part: slice | Tensor) -> Batch:
    """Some of the sequences, their numbers as int64."""
    return Batch(*(tensor[part].long() for tensor in (batch.ids, batch.positions, batch.values)))


def _accuracy(task: Task, num_right: float) -> Accuracy:
    return Accuracy(task.length, task.pairs, task.num_examples, num_right / (task.num_examples * task.pairs))


def mean_accuracy(accuracies: Sequence[Accuracy]) -> float:
    """Mean over all test sequences with equal weights, as in Zoology's figures."""
    count = sum(accuracy.num_examples for accuracy in accuracies)
    return sum(accuracy.accuracy * accuracy.num_examples for accuracy in accuracies) / count
