"""From a corpus directory to an RWKV-7 file in the official layout."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from nsm_core.errors import ConfigError
from nsm_core.tokenizer import TOKENIZER_FILE, BpeTokenizer
from nsm_lab.training.data import TokenizedSplit, tokenize_split
from nsm_lab.training.log import log_line
from nsm_lab.training.rwkv7.config import Rwkv7TrainConfig
from nsm_lab.training.rwkv7.model import Rwkv7

WEIGHTS_FILE = "rwkv7.safetensors"  # names of the official layout
MATRICES = ("receptance.weight", "key.weight", "value.weight", "output.weight")  # of a layer: by Muon
VALIDATION_BATCHES = 4
# Operations a second that a CPU of a few cores does at best, and how many hours of them are worth a word
CPU_OPERATIONS, LONG_HOURS = 5e10, 1.0


def train(config: Rwkv7TrainConfig) -> float:
    """Writes the model, in bf16; returns the loss on validation rows in nats a token. Raises ConfigError."""
    torch.manual_seed(config.seed)
    torch.backends.cuda.matmul.allow_tf32 = True
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = BpeTokenizer.load(config.tokenizer)
    cache = config.cache or config.out / "cache"
    splits = {name: tokenize_split(config.data, name, tokenizer, cache) for name in ("train", "val")}
    need = f"{config.rows} rows of {config.seq_len} (--rows, --seq-len), which begin anywhere, need"
    _require_tokens(splits["train"], (config.rows + 1) * config.seq_len + 2, need)
    _require_tokens(splits["val"], config.seq_len + 2, f"a row of {config.seq_len} (--seq-len) needs")
    model = Rwkv7(tokenizer.vocab_size, config.width, config.layers).to(device)
    if device.type == "cpu":
        _warn_of_hours(sum(parameter.numel() for parameter in model.parameters()), config)
    batches = _batches(splits["train"], config, device)
    _steps(model, batches, config)
    loss = _validate(model, splits["val"], config, device)
    log_line(f"validation loss {loss:.4f}")
    config.out.mkdir(parents=True, exist_ok=True)
    named = {name: value.detach().to(torch.bfloat16).cpu() for name, value in model.state_dict().items()}
    save_file(named, config.out / WEIGHTS_FILE)
    tokenizer.save(config.out / TOKENIZER_FILE)
    return loss


def _require_tokens(split: TokenizedSplit, num_tokens: int, need: str) -> None:
    """Raises ConfigError where the split is shorter."""
    if len(split.ids) < num_tokens:
        raise ConfigError(
            f"the {split.name} split has {len(split.ids)} tokens; {need} {num_tokens}: choose less, or a larger corpus"
        )


def _warn_of_hours(num_parameters: int, config: Rwkv7TrainConfig) -> None:
    """A line before the first step of a run that a CPU needs hours for: the sizes by default are a GPU's."""
    num_tokens = config.steps * config.rows * config.seq_len
    hours = 6 * num_parameters * num_tokens / CPU_OPERATIONS / 3600  # two a parameter and token forward, four back
    if hours >= LONG_HOURS:
        log_line(
            f"{num_parameters:,} parameters and {num_tokens:,} tokens take a CPU at least {hours:,.0f} hours: "
            "--layers, --width, --rows, --seq-len and --steps make it less"
        )


def _steps(model: Rwkv7, batches: Iterator[Tensor], config: Rwkv7TrainConfig) -> None:
    optimizers = _optimizers(model, config)
    total, began = torch.zeros((), device=next(model.parameters()).device), time.monotonic()
    for step in range(config.steps):
        loss = _loss(model, next(batches))
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip)
        for optimizer, rates in optimizers:
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * _factor((step + 1) / config.steps, config)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        total += loss.detach()
        if (step + 1) % config.log_every == 0:
            mean, now = float(total / config.log_every), time.monotonic()
            speed = config.log_every * config.rows * config.seq_len / (now - began)
            log_line(f"step {step + 1} of {config.steps}  train_loss {mean:.4f}  tokens_per_s {speed:.0f}")
            total.zero_()
            began = now


def _optimizers(model: Rwkv7, config: Rwkv7TrainConfig) -> list[tuple[torch.optim.Optimizer, list[float]]]:
    """Each with the peak rates of its groups."""
    named = dict(model.named_parameters())
    muon = [value for name, value in named.items() if name.startswith("blocks.") and name.endswith(MATRICES)]
    outer = [named["emb.weight"], named["head.weight"]]
    known = {id(value) for value in (*muon, *outer)}
    rest = [value for value in named.values() if id(value) not in known]
    return [
        (torch.optim.Muon(muon, lr=config.muon_lr, weight_decay=0.1, momentum=0.95), [config.muon_lr]),
        (
            torch.optim.AdamW(
                [{"params": outer}, {"params": rest}], lr=config.adam_lr, betas=(0.9, 0.95), eps=1e-12, weight_decay=0.0
            ),
            [config.adam_lr, config.adam_lr / 2],
        ),
    ]


def _factor(done: float, config: Rwkv7TrainConfig) -> float:
    """Share of the peak rates after the share `done` of the steps."""
    if done < config.warmup:
        return done / config.warmup
    return min(1.0, (1.0 - done) / config.decay) if config.decay > 0 else 1.0


def _batches(split: TokenizedSplit, config: Rwkv7TrainConfig, device: torch.device) -> Iterator[Tensor]:
    """[rows, seq_len + 1], each place of the split once in an epoch; epochs begin at other tokens."""
    rng = np.random.default_rng(config.seed)
    length = config.seq_len
    while True:
        starts = rng.permutation((len(split.ids) - length - 1) // length) * length + int(rng.integers(length))
        for at in range(0, len(starts) - config.rows + 1, config.rows):
            yield _windows(split, starts[at : at + config.rows], length, device)


def _windows(split: TokenizedSplit, starts: np.ndarray, length: int, device: torch.device) -> Tensor:
    starts = np.minimum(starts, len(split.ids) - length - 1)
    return torch.from_numpy(split.ids[starts[:, None] + np.arange(length + 1)].astype(np.int64)).to(device)


def _loss(model: Rwkv7, window: Tensor) -> Tensor:
    with torch.autocast(window.device.type, torch.bfloat16, enabled=window.device.type == "cuda"):
        return F.cross_entropy(model(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten())


@torch.no_grad()
def _validate(model: Rwkv7, split: TokenizedSplit, config: Rwkv7TrainConfig, device: torch.device) -> float:
    count = VALIDATION_BATCHES * config.rows
    starts = np.linspace(0, len(split.ids) - config.seq_len - 2, count).astype(np.int64)
    parts = np.split(starts, VALIDATION_BATCHES)
    losses = [float(_loss(model, _windows(split, part, config.seq_len, device))) for part in parts]
    return sum(losses) / len(losses)
