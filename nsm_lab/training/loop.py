"""`nsm train`: from a corpus directory to a model directory."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nsm_core.errors import ConfigError
from nsm_core.model.balance import slot_use, weighted
from nsm_core.model.keyed import KeyedMixer
from nsm_core.model.nsm import NsmModel
from nsm_core.model.router import Router
from nsm_core.model.storage import WeightFormat, read_model, save_model
from nsm_core.ops.slot_scan.chunked import CHUNK_LEN
from nsm_core.state.spec import State
from nsm_core.tokenizer import TOKENIZER_FILE, BpeTokenizer, Tokenizer
from nsm_lab.baselines.register import register_baselines
from nsm_lab.training import checkpointing
from nsm_lab.training.average import WeightAverage
from nsm_lab.training.config import TrainConfig
from nsm_lab.training.data import IGNORED_TARGET, Batch, PackedBatches, TokenizedSplit, tokenize_split
from nsm_lab.training.data_files import read_documents
from nsm_lab.training.distributed import World, join_world, leave_world, mean_over_world
from nsm_lab.training.keeping import KeepingHeads, make_keeping_heads, mean_strengths
from nsm_lab.training.log import TrainLog, log_line
from nsm_lab.training.optim import Optimizers
from nsm_lab.training.recall import ALL_WORDS, ANSWERS_ALONE, RecallMix, recall_split, shares_by_time
from nsm_lab.training.tiers import TierDraw

LEFT_SHARE = 0.7  # of a token's probability in the first turn of a loop, what a later turn may have without a penalty
MOST_PENALISED = 1.0 - 1e-4
BUDGET_TOKENS = 4096  # of a batch, by which the mean strength of a keeping head is judged


class LossModule(nn.Module):
    """Model and loss as one module, for data-parallel training.

    `balance` and `z`: weights of the penalties on how the routers use their slots (nsm_core/model/balance.py);
    `key_spread`: of the penalty on written routes of keyed layers that resemble each other; `loop_penalty`: of that on
    tokens which a loop says again.
    """

    def __init__(
        self,
        model: NsmModel,
        *,
        balance: float = 0.0,
        z: float = 0.0,
        key_spread: float = 0.0,
        loop_penalty: float = 0.0,
    ) -> None:
        super().__init__()
        self.model, self._key_spread, self._loop_penalty = model, key_spread, loop_penalty
        self._keyed = [module for module in model.modules() if isinstance(module, KeyedMixer)] if key_spread else []
        for mixer in self._keyed:
            mixer.has_penalties = True
        self._balance, self._z = balance, z
        self.routers = [module for module in model.modules() if isinstance(module, Router)]
        for router in self.routers:
            router.has_penalties = balance > 0 or z > 0

    def forward(self, batch: Batch, state: State, is_fresh: bool) -> tuple[Tensor, State, Tensor]:
        """Mean loss over the valid targets in nats per token, the state after the batch, and the weighted penalties.

        `is_fresh`: no row continues from `state`.
        """
        for router in self.routers:  # a recomputed block leaves its penalties twice
            router.penalties.clear()
        for mixer in self._keyed:
            mixer.penalties.clear()
        hidden, state = self._read(batch, state, is_fresh and "A" in self.model.config.layer_pattern)
        logits = self.model.logits(hidden)
        loss, of_loops = _mean_losses(logits, batch)
        penalties = [penalty for router in self.routers for penalty in router.penalties]
        penalty = self._loop_penalty * of_loops + weighted(penalties, self._balance, self._z)
        for crowding in (crowding for mixer in self._keyed for crowding in mixer.penalties):
            penalty = penalty + self._key_spread * crowding
        return loss, {name: value.detach() for name, value in state.items()}, penalty

    def _read(self, batch: Batch, state: State, without_cache: bool) -> tuple[Tensor, State]:
        if without_cache and not batch.has_inner_starts:  # plain causal attention, which has the fastest kernels
            state = self.model.initial_state(len(batch.ids))
            return self.model.read(batch.ids, state, valid=batch.valid, is_fresh=True, num_slots=batch.num_slots)
        return self.model.read(
            batch.ids, state, valid=batch.valid, reset=batch.reset, is_fresh=without_cache, num_slots=batch.num_slots
        )


def _mean_losses(logits: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """[] and [], in nats: over the targets of `batch`, each as often as its weight says, and the penalty on loops."""
    flat, targets = logits.flatten(0, 1), batch.targets.flatten()
    if batch.weights is None:
        loss = F.cross_entropy(flat, targets, ignore_index=IGNORED_TARGET)
        return loss, loss.new_zeros(())
    losses = F.cross_entropy(flat, targets, ignore_index=IGNORED_TARGET, reduction="none")
    weights = torch.where(targets == IGNORED_TARGET, 0.0, batch.weights.flatten())
    total = weights.sum().clamp(min=1.0)
    of_loops = losses.new_zeros(())
    if batch.turns is not None:
        of_loops = loop_penalties(losses.view_as(batch.turns), batch.turns).sum() / total
    return (losses * weights).sum() / total, of_loops


def loop_penalties(losses: Tensor, turns: Tensor) -> Tensor:
    """losses [B,T] in nats, turns [B,T] as of `Batch` -> [B,T], in nats, 0 for tokens outside of loops.

    A token that a loop says again must not become likelier by that: what its probability exceeds LEFT_SHARE of the one
    in the first turn is punished, as of a token that would be wrong (Xu et al. 2022, "Learning to Break the Loop").
    """
    said = (-losses).exp()
    first = torch.arange(losses.shape[1], device=losses.device) - turns
    then = said.detach().gather(1, first.clamp(min=0))
    excess = (said - LEFT_SHARE * then).clamp(min=0.0, max=MOST_PENALISED)
    return torch.where((turns > 0) & (first >= 0), -torch.log1p(-excess), 0.0)


class BatchSource:
    """Batches on the device, the next one prepared while this one is used."""

    def __init__(self, batches: PackedBatches, device: torch.device) -> None:
        self._batches, self._device = batches, device
        self._pool = ThreadPoolExecutor(1)
        self._next: tuple[int, Future[Batch]] | None = None

    def get(self, step: int) -> Batch:
        ready = self._next[1] if self._next and self._next[0] == step else self._pool.submit(self._batches.batch, step)
        batch = ready.result()
        self._next = (step + 1, self._pool.submit(self._batches.batch, step + 1))
        return batch_to(batch, self._device)

    def close(self) -> None:
        """Gives up the batch that was being prepared."""
        self._pool.shutdown(cancel_futures=True)


def batch_to(batch: Batch, device: torch.device) -> Batch:
    return _map(batch, lambda tensor: tensor.to(device, non_blocking=True))


def _rows(batch: Batch, part: slice) -> Batch:
    return _map(batch, lambda tensor: tensor[part])


def _map(batch: Batch, change: Callable[[Tensor], Tensor]) -> Batch:
    return dataclasses.replace(
        batch,
        ids=change(batch.ids),
        targets=change(batch.targets),
        valid=change(batch.valid),
        reset=change(batch.reset),
        weights=None if batch.weights is None else change(batch.weights),
        turns=None if batch.turns is None else change(batch.turns),
        num_slots=None if batch.num_slots is None else change(batch.num_slots),
    )


def carries_state(step: int, config: TrainConfig, steps_per_epoch: int) -> bool:
    """Whether `step` continues from the state of the step before. A pure function, so that a resumed run agrees."""
    if step % steps_per_epoch == 0:
        return False
    generator = torch.Generator().manual_seed((config.seed << 32) + step)
    return torch.rand((), generator=generator).item() < config.carry


def _load_tokenizer(config: TrainConfig, world: World) -> Tokenizer:
    """The given tokenizer, the one of an earlier start of this run, or a new one learned from the training split."""
    if config.tokenizer is not None:
        return BpeTokenizer.load(config.tokenizer)
    file = config.out / TOKENIZER_FILE
    if world.is_main and not file.exists():
        log_line(f"learning a tokenizer of {config.model.vocab_size} tokens from the training split")
        texts = (document.text for document in read_documents(config.data, "train"))
        BpeTokenizer.train(texts, vocab_size=config.model.vocab_size).save(file)
    if world.size > 1:
        torch.distributed.barrier()
    return BpeTokenizer.load(file)


class Interval:
    """Means of loss and penalties, and the speed since the last row of the log."""

    def __init__(self, tokens_per_step: int) -> None:
        self._tokens_per_step, self._started = tokens_per_step, time.monotonic()
        self._sums, self._steps = torch.zeros(2), 0

    def add(self, losses: Tensor) -> None:
        """losses [2] stays on the device: reading a number there would make every step wait for the one before."""
        self._sums = self._sums.to(losses.device) + losses
        self._steps += 1

    def numbers(self, done: int) -> dict[str, float]:
        """Fields of the log at step `done`."""
        loss, penalty = (self._sums / self._steps).tolist()  # waits for the device, so it comes before the clock
        speed = self._steps * self._tokens_per_step / (time.monotonic() - self._started)
        tokens = done * self._tokens_per_step
        return {"tokens": tokens, "train_loss": loss, "routing_loss": penalty, "tokens_per_s": speed}


class Trainer:
    """One run on one process; the other processes of the world do the same with other rows."""

    def __init__(self, config: TrainConfig, world: World) -> None:
        self.config, self.world = config, world
        if not config.resume and (config.out / checkpointing.RESUME_FILE).exists():
            raise ConfigError(f"{config.out} holds an earlier run: go on with --resume, or choose another --out")
        config.out.mkdir(parents=True, exist_ok=True)
        self.tokenizer = _load_tokenizer(config, world)
        if self.tokenizer.vocab_size > config.model.vocab_size:
            raise ConfigError(
                f"the tokenizer has {self.tokenizer.vocab_size} tokens, the model only {config.model.vocab_size}"
            )
        torch.manual_seed(config.seed)
        # The router's products stay outside bf16; on a GPU they may round to TF32 in training, where routing moves at
        # every step anyway. A served model computes them in full.
        torch.backends.cuda.matmul.allow_tf32 = True
        self.model = self._start().to(world.device)
        self.train_batches = self._batches("train")
        self.val_batches = self._batches("val")
        self.optimizers = Optimizers(self.model, config)
        self.average = WeightAverage(self.model, config.ema) if config.ema > 0 else None
        self._tiers = TierDraw(
            (*config.model.state_tiers, config.model.num_memory_slots),
            config.tier_share,
            rows=config.rows,
            seed=config.seed,
            rank=world.rank,
        )
        self.first_step = 0
        if config.resume:
            self.first_step = checkpointing.load(config.out, self.model, self.optimizers, self.average)
        self._keeping = KeepingHeads(self.model, config.keep_strengths, config.keep_context)
        self.module = self._build_module()
        self._routers = self._loss_module.routers

    def _start(self) -> NsmModel:
        """The model as the run begins; what a resumed run has learned is loaded over it."""
        model = NsmModel(self.config.model)
        if self.config.start is not None:
            started, _, _ = read_model(self.config.start)
            if started.config != self.config.model:
                raise ConfigError(f"{self.config.start} holds a model of other sizes than the run's")
            model.load_state_dict(started.state_dict())
        make_keeping_heads(model, self.config.keep_strengths)
        return model

    def _batches(self, split: str) -> PackedBatches:
        if split not in ("train", "val"):
            raise ValueError(f"the split must be train or val, got {split}")
        cache = self.config.cache or self.config.out / "cache"
        if self.world.is_main:
            log_line(f"token ids of the {split} split: encoded, or mapped from {cache}")
        tokenized = tokenize_split(self.config.data, split, self.tokenizer, cache)  # type: ignore[arg-type]
        rows = self.config.rows if split == "train" else max(1, self.config.rows // 4)
        if split == "train" and self.config.recall > 0:
            tokenized = self._with_recall(tokenized)
        border = self.config.seq_len if self.config.whole_rows else CHUNK_LEN
        return PackedBatches(
            tokenized, rows, self.config.seq_len, border, self.config.seed, self.world.rank, self.world.size
        )

    def _with_recall(self, split: TokenizedSplit) -> TokenizedSplit:
        """As many copies of the split, each with other insertions, as the run reads."""
        config = self.config
        shares = (config.recall, config.recall if config.recall_end is None else config.recall_end)
        strips = config.rows * self.world.size
        tokens_read = config.steps * strips * config.seq_len * (1.0 - sum(shares) / 2 - config.loops)
        copies = math.ceil(tokens_read / split.num_tokens)
        of_copies = shares_by_time(
            split,
            shares=shares,
            copies=copies,
            strips=strips,
            read=tokens_read / (copies * split.num_tokens),
            seed=config.seed,
        )
        workers = os.cpu_count() or 1
        of_passages = {"silent": config.silent_tokens, "passage": config.passage_weight}
        answers = dataclasses.replace(ANSWERS_ALONE, first_answer=config.first_answer, **of_passages)
        return recall_split(
            split,
            self.tokenizer,
            shares=of_copies.tolist(),
            loops=config.loops,
            loss=answers if config.recall_loss == "answers" else ALL_WORDS,
            mix=RecallMix(config.passages, config.far_passages),
            seed=config.seed,
            workers=workers,
        )

    def _build_module(self) -> nn.Module:
        self.model.checkpoint_blocks = self.config.checkpoint_blocks
        for block in self.model.layers:
            block.dropout.p = self.config.dropout
            if self.config.compile and self.world.device.type == "cuda":
                block.compile(dynamic=False)  # one block is compiled, all others share its code
        module: nn.Module = LossModule(
            self.model,
            balance=self.config.balance_loss,
            z=self.config.z_loss,
            key_spread=self.config.key_spread,
            loop_penalty=self.config.loop_penalty,
        )
        if self.world.size > 1:
            module = nn.parallel.DistributedDataParallel(module)
        return module

    def _autocast(self) -> contextlib.AbstractContextManager[object]:
        precision = self.config.precision
        if precision == "auto":
            precision = "bf16" if self.world.device.type == "cuda" else "fp32"
        if precision == "fp32":
            return contextlib.nullcontext()
        return torch.autocast(self.world.device.type, torch.bfloat16)

    def run(self) -> Path:
        """Trains to the last step; returns the model directory."""
        config, states = self.config, self._zero_states(self.config.rows)
        log = TrainLog(config.out, total_steps=config.steps, first_step=self.first_step, enabled=self.world.is_main)
        with log, contextlib.closing(BatchSource(self.train_batches, self.world.device)) as source:
            interval = Interval(self.train_batches.tokens_per_step)
            for step in range(self.first_step, config.steps):
                batch = source.get(step)
                losses, states = self._forward_backward(batch, states, step)
                factor, norm = self.optimizers.step(step)
                self._follow_step(batch, step)
                interval.add(losses)
                log.advance()
                done = step + 1
                if done % config.eval_every == 0 or done == config.steps:
                    row = {"step": done, **interval.numbers(done), "lr_factor": factor, "grad_norm": float(norm)}
                    row |= self._slot_numbers()
                    with self._averaged():
                        log.write({**row, "val_loss": self.validate(log.progress)})
                    interval = Interval(self.train_batches.tokens_per_step)
                if done % config.save_every == 0 or done == config.steps:
                    self._save(done)
        return config.out

    def _follow_step(self, batch: Batch, step: int) -> None:
        if self.config.keep_budget and step % self.config.keep_budget == 0:
            with self._autocast():
                means = mean_strengths(self.model, batch.ids[:1, :BUDGET_TOKENS])
            self._keeping.keep_to_budget([mean_over_world(mean, self.world) for mean in means])
        self._keeping.hold()
        if self.average is not None:
            self.average.update()
        for router in self._routers:
            router.rescue_dead_slots()

    def _slot_numbers(self) -> dict[str, float]:
        """How this process's routers used their slots since the last row of the log; nothing without routers."""
        use = slot_use([use for router in self._routers if (use := router.take_use()) is not None])
        return {} if use is None else dataclasses.asdict(use)

    def _averaged(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self.average is None else self.average.applied()

    def _zero_states(self, rows: int) -> list[State]:
        """One state a part of the batch; the first step resets every row, so the values do not matter."""
        part = rows // self.config.accumulate
        return [self.model.state_spec.zeros(part, self.world.device) for _ in range(self.config.accumulate)]

    def _forward_backward(self, batch: Batch, states: list[State], step: int) -> tuple[Tensor, list[State]]:
        """[2]: the loss and the penalties, and the states after the batch."""
        is_carried = carries_state(step, self.config, self.train_batches.steps_per_epoch) and step != self.first_step
        if not is_carried:
            batch.reset[:, 0] = True
        num_slots = self._tiers.rows(step, is_carried=is_carried)
        if num_slots is not None:
            batch = dataclasses.replace(batch, num_slots=num_slots.to(self.world.device))
        self.module.train()
        rows = self.config.rows // self.config.accumulate
        total, new_states = torch.zeros(2, device=self.world.device), []
        for index, state in enumerate(states):
            last = index == len(states) - 1
            with self._no_sync(not last), self._autocast():
                part = _rows(batch, slice(index * rows, (index + 1) * rows))
                loss, state, penalty = self.module(part, state, not is_carried)
                ((loss + penalty) / len(states)).backward()
            new_states.append(state)
            total += torch.stack((loss.detach(), penalty.detach())) / len(states)
        return mean_over_world(total, self.world), new_states

    def _no_sync(self, skip: bool) -> contextlib.AbstractContextManager[object]:
        if skip and isinstance(self.module, nn.parallel.DistributedDataParallel):
            return self.module.no_sync()
        return contextlib.nullcontext()

    @torch.no_grad()
    def validate(self, progress: Callable[[str], None] = lambda line: None) -> float:
        """Mean loss in nats per token on the first validation batches, each row from the learned start."""
        self.module.eval()
        total = torch.zeros((), device=self.world.device)
        batches = min(self.config.eval_batches, self.val_batches.steps_per_epoch)
        for step in range(batches):
            batch = batch_to(self.val_batches.batch(step), self.world.device)
            batch.reset[:, 0] = True
            state = self.model.state_spec.zeros(len(batch.ids), self.world.device)
            with self._autocast():
                loss, _, _ = LossModule.forward(self._loss_module, batch, state, True)
            total += loss / batches
            progress(f"validation batch {step + 1} of {batches}")
        return float(mean_over_world(total, self.world))

    @property
    def _loss_module(self) -> LossModule:
        inner = self.module.module if isinstance(self.module, nn.parallel.DistributedDataParallel) else self.module
        if not isinstance(inner, LossModule):
            raise TypeError(f"the trained module must be a LossModule, got {type(inner).__name__}")
        return inner

    def _save(self, step: int) -> None:
        if self.world.is_main:
            checkpointing.save(self.config.out, step, self.model, self.optimizers, self.average)
            with self._averaged():
                save_model(self.model, self.tokenizer, self.config.out, WeightFormat(self.config.weight_format))


def train(config: TrainConfig) -> Path:
    """Runs `config`; returns the model directory. Raises ConfigError or CheckpointError."""
    register_baselines()
    world = join_world(config.device)
    try:
        return Trainer(config, world).run()
    finally:
        leave_world()
