"""`nsm train`: from a corpus directory to a model directory."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from nsm_core.errors import CheckpointError, ConfigError
from nsm_core.model.layers import Segments
from nsm_core.model.nsm import NsmModel
from nsm_core.model.storage import WeightFormat, save_model
from nsm_core.ops.slot_scan.chunked import CHUNK_LEN
from nsm_core.state.spec import State
from nsm_core.tokenizer import TOKENIZER_FILE, Tokenizer
from nsm_core.training.config import TrainConfig
from nsm_core.training.data import IGNORED_TARGET, Batch, PackedBatches, tokenize_split
from nsm_core.training.data_files import read_documents
from nsm_core.training.distributed import World, join_world, leave_world, mean_over_world
from nsm_core.training.log import TrainLog
from nsm_core.training.optim import Optimizers

RESUME_FILE = "resume.safetensors"


class LossModule(nn.Module):
    """Model and loss as one module, which is what data-parallel training wraps."""

    def __init__(self, model: NsmModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Batch, state: State) -> tuple[Tensor, State]:
        """Mean loss over the valid targets in nats per token, and the state after the batch."""
        segments = Segments(valid=batch.valid, reset=batch.reset)
        hidden, state = self.model.read(batch.ids, state, segments)
        logits = self.model.logits(hidden)
        loss = F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), ignore_index=IGNORED_TARGET)
        return loss, {name: value.detach() for name, value in state.items()}


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


def batch_to(batch: Batch, device: torch.device) -> Batch:
    moved = (tensor.to(device, non_blocking=True) for tensor in (batch.ids, batch.targets, batch.valid, batch.reset))
    ids, targets, valid, reset = moved
    return Batch(ids=ids, targets=targets, valid=valid, reset=reset)


def _rows(batch: Batch, part: slice) -> Batch:
    return Batch(ids=batch.ids[part], targets=batch.targets[part], valid=batch.valid[part], reset=batch.reset[part])


def carries_state(step: int, config: TrainConfig, steps_per_epoch: int) -> bool:
    """Whether step `step` goes on from the state of the step before: a pure function, so that a resumed run agrees."""
    if step % steps_per_epoch == 0:
        return False
    generator = torch.Generator().manual_seed((config.seed << 32) + step)
    return torch.rand((), generator=generator).item() < config.carry


def _load_tokenizer(config: TrainConfig, world: World) -> Tokenizer:
    """The given tokenizer, the one of an earlier start of this run, or a new one learned from the training split."""
    if config.tokenizer is not None:
        return Tokenizer.load(config.tokenizer)
    file = config.out / TOKENIZER_FILE
    if world.is_main and not file.exists():
        texts = (document.text for document in read_documents(config.data, "train"))
        Tokenizer.train(texts, vocab_size=config.model.vocab_size).save(file)
    if world.size > 1:
        torch.distributed.barrier()
    return Tokenizer.load(file)


class Trainer:
    """One run on one process; the other processes of the world do the same with other rows."""

    def __init__(self, config: TrainConfig, world: World) -> None:
        self.config, self.world = config, world
        config.out.mkdir(parents=True, exist_ok=True)
        self.tokenizer = _load_tokenizer(config, world)
        if self.tokenizer.vocab_size > config.model.vocab_size:
            raise ConfigError(
                f"the tokenizer has {self.tokenizer.vocab_size} tokens, the model only {config.model.vocab_size}"
            )
        torch.manual_seed(config.seed)
        self.model = NsmModel(config.model).to(world.device)
        self.train_batches = self._batches("train")
        self.val_batches = self._batches("val")
        self.optimizers = Optimizers(self.model, config)
        self.first_step = self._resume() if config.resume else 0
        self.module = self._build_module()

    def _batches(self, split: str) -> PackedBatches:
        assert split in ("train", "val")
        tokenized = tokenize_split(self.config.data, split, self.tokenizer, self.config.out / "cache")  # type: ignore[arg-type]
        rows = self.config.rows if split == "train" else max(1, self.config.rows // 4)
        return PackedBatches(
            tokenized, rows, self.config.seq_len, CHUNK_LEN, self.config.seed, self.world.rank, self.world.size
        )

    def _build_module(self) -> nn.Module:
        self.model.checkpoint_blocks = self.config.checkpoint_blocks
        for block in self.model.layers:
            block.dropout.p = self.config.dropout
            if self.config.compile and self.world.device.type == "cuda":
                block.compile(dynamic=False)  # one block is compiled, all others share its code
        module: nn.Module = LossModule(self.model)
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
        config, source = self.config, BatchSource(self.train_batches, self.world.device)
        state = self._zero_states(self.config.rows)
        log = TrainLog(config.out, total_steps=config.steps, first_step=self.first_step, enabled=self.world.is_main)
        with log:
            since, losses = time.monotonic(), 0.0
            for step in range(self.first_step, config.steps):
                loss, state = self._forward_backward(source.get(step), state, step)
                factor, norm = self.optimizers.step(step)
                for block in self.model.layers:
                    block.mixer.router.rescue_dead_slots()
                losses += loss
                log.advance(loss)
                done = step + 1
                if done % config.eval_every == 0 or done == config.steps:
                    num_steps = (done - self.first_step - 1) % config.eval_every + 1
                    spent = time.monotonic() - since
                    log.write(
                        {
                            "step": done,
                            "tokens": done * self.train_batches.tokens_per_step,
                            "train_loss": losses / num_steps,
                            "val_loss": self.validate(),
                            "lr_factor": factor,
                            "grad_norm": norm,
                            "tokens_per_s": num_steps * self.train_batches.tokens_per_step / spent,
                        }
                    )
                    since, losses = time.monotonic(), 0.0
                if done % config.save_every == 0 or done == config.steps:
                    self._save(done)
        return config.out

    def _zero_states(self, rows: int) -> list[State]:
        """One state a part of the batch; the first step resets every row, so the values do not matter."""
        part = rows // self.config.accumulate
        return [self.model.state_spec.zeros(part, self.world.device) for _ in range(self.config.accumulate)]

    def _forward_backward(self, batch: Batch, states: list[State], step: int) -> tuple[float, list[State]]:
        if not carries_state(step, self.config, self.train_batches.steps_per_epoch) or step == self.first_step:
            batch.reset[:, 0] = True
        self.module.train()
        rows = self.config.rows // self.config.accumulate
        total, new_states = torch.zeros((), device=self.world.device), []
        for index, state in enumerate(states):
            last = index == len(states) - 1
            with self._no_sync(not last), self._autocast():
                loss, state = self.module(_rows(batch, slice(index * rows, (index + 1) * rows)), state)
                (loss / len(states)).backward()
            new_states.append(state)
            total += loss.detach() / len(states)
        return float(mean_over_world(total, self.world)), new_states

    def _no_sync(self, skip: bool) -> contextlib.AbstractContextManager[object]:
        if skip and isinstance(self.module, nn.parallel.DistributedDataParallel):
            return self.module.no_sync()
        return contextlib.nullcontext()

    @torch.no_grad()
    def validate(self) -> float:
        """Mean loss in nats per token on the first validation batches, each row from the learned start."""
        self.module.eval()
        total = torch.zeros((), device=self.world.device)
        batches = min(self.config.eval_batches, self.val_batches.steps_per_epoch)
        for step in range(batches):
            batch = batch_to(self.val_batches.batch(step), self.world.device)
            batch.reset[:, 0] = True
            state = self.model.state_spec.zeros(len(batch.ids), self.world.device)
            with self._autocast():
                loss, _ = LossModule.forward(self._loss_module, batch, state)
            total += loss / batches
        return float(mean_over_world(total, self.world))

    @property
    def _loss_module(self) -> LossModule:
        inner = self.module.module if isinstance(self.module, nn.parallel.DistributedDataParallel) else self.module
        assert isinstance(inner, LossModule)
        return inner

    def _save(self, step: int) -> None:
        if not self.world.is_main:
            return
        save_model(self.model, self.tokenizer, self.config.out, WeightFormat(self.config.weight_format))
        tensors = {f"model.{name}": value for name, value in self.model.state_dict().items()}
        tensors.update({f"optimizer.{name}": value for name, value in self.optimizers.tensors().items()})
        partial = self.config.out / (RESUME_FILE + ".partial")
        save_file(
            {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()},
            str(partial),
            metadata={"step": str(step), "config": self.config.model.to_json()},
        )
        os.replace(partial, self.config.out / RESUME_FILE)

    def _resume(self) -> int:
        """Loads the run's own checkpoint; returns the step to go on with."""
        file = self.config.out / RESUME_FILE
        if not file.exists():
            raise CheckpointError(f"nothing to resume: {file} does not exist")
        with safe_open(str(file), framework="pt") as stored:
            metadata = stored.metadata()
            if metadata["config"] != self.config.model.to_json():
                raise CheckpointError(f"{file} was made with another model configuration")
            tensors = dict(_prefixed(stored.keys(), stored.get_tensor))
        device = self.world.device
        self.model.load_state_dict({k.removeprefix("model."): v for k, v in tensors.items() if k.startswith("model.")})
        self.optimizers.load_tensors(
            {k.removeprefix("optimizer."): v.to(device) for k, v in tensors.items() if k.startswith("optimizer.")}
        )
        return int(metadata["step"])


def _prefixed(names: list[str], get: object) -> Iterator[tuple[str, Tensor]]:
    for name in names:
        yield name, get(name)  # type: ignore[operator]


def train(config: TrainConfig) -> Path:
    """Runs `config`; returns the model directory. Raises ConfigError or CheckpointError."""
    world = join_world(config.device)
    try:
        return Trainer(config, world).run()
    finally:
        leave_world()
