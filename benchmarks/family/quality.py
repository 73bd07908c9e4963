"""Bits per byte of one model on Tiny Shakespeare after the same training as all others."""

from __future__ import annotations

import gzip
import math
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.family.models import Size, build
from benchmarks.family.timing import autocast, loss_of
from nsm_core.model.nsm import NsmModel

TEXT = Path(__file__).resolve().parents[2] / "data" / "tinyshakespeare" / "input.txt.gz"
TRAIN_SHARE = 0.9  # the rest is for validation
LONG_ROWS, LONG_FACTOR = 8, 16  # rows read with their state carried on, and how many times longer than in training
WARMUP = 0.05
Row = dict[str, Any]


def read_text(path: Path) -> tuple[Tensor, Tensor]:
    """The bytes [N] int64 for training and for validation, of a file that may be gzipped."""
    raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    ids = torch.frombuffer(bytearray(raw), dtype=torch.uint8).long()
    cut = int(TRAIN_SHARE * len(ids))
    return ids[:cut], ids[cut:]


def train_and_measure(
    name: str,
    size: Size,
    *,
    lr: float,
    steps: int,
    rows: int,
    held_out: int,
    text: Path,
    device: torch.device,
    limit_s: float,
) -> Row:
    """AdamW, cosine schedule, clipping at 1; the same batches for all models; measured on the first `held_out` bytes.

    Ends with a `reason` when it is late.
    """
    train, unseen = (part.to(device) for part in read_text(text))
    model = build(name, size, size.train_len, device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), fused=device.type == "cuda")
    generator = torch.Generator().manual_seed(1)
    norms: list[Tensor] = []
    started = time.monotonic()
    for step in range(steps):
        ids = _batch(train, rows, size.train_len, generator)
        for group in optimizer.param_groups:
            group["lr"] = lr * _factor(step, steps)
        optimizer.zero_grad(set_to_none=True)
        loss_of(model, ids[:, :-1], ids[:, 1:]).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()
        if step % 20 == 19:
            norms = [torch.as_tensor(float(norm)) for norm in norms]  # waits for the device
            if time.monotonic() - started > limit_s and step + 1 < steps:
                return {"reason": f"{step + 1} of {steps} steps in {limit_s:.0f} s", "lr": lr}
    trained_s = time.monotonic() - started
    latest = [float(norm) for norm in norms[-max(2, steps // 10) :]]
    return {
        "lr": lr,
        "steps": steps,
        "tokens": steps * rows * size.train_len,
        "train_s": trained_s,
        "first_gradient_norm": float(norms[0]),
        "gradient_norm": statistics.median(latest),
        **_measure(model.eval(), unseen[:held_out], size.train_len),
    }


def _factor(step: int, steps: int) -> float:
    done = (step + 1) / steps
    return min(1.0, done / WARMUP) * 0.5 * (1.0 + math.cos(math.pi * done))


def _batch(train: Tensor, rows: int, length: int, generator: torch.Generator) -> Tensor:
    starts = torch.randint(len(train) - length - 1, (rows,), generator=generator)
    return train[(starts[:, None] + torch.arange(length + 1)).to(train.device)]


@torch.inference_mode()
def _measure(model: NsmModel, held_out: Tensor, length: int) -> Row:
    """Rows as long as in training, and `LONG_FACTOR` times longer ones from the first length on."""
    short = held_out[: len(held_out) // (length + 1) * (length + 1)].view(-1, length + 1)
    nats = [_nats(model, part[:, :-1], part[:, 1:], length) for part in torch.split(short, 32)]
    row = {"bits_per_byte": float(torch.cat(nats).mean()) / math.log(2.0)}
    long_len = min(LONG_FACTOR * length, len(held_out) // LONG_ROWS - 1)
    rows = held_out[: LONG_ROWS * (long_len + 1)].view(LONG_ROWS, long_len + 1)
    later = _nats(model, rows[:, :-1], rows[:, 1:], length)[:, length:]
    return row | {"long_bits_per_byte": float(later.mean()) / math.log(2.0), "long_tokens": long_len}


def _nats(model: NsmModel, ids: Tensor, targets: Tensor, piece_len: int) -> Tensor:
    """Cross-entropy of every byte [B,T], with the state carried from piece to piece."""
    state, found = model.initial_state(len(ids)), []
    with autocast(ids.device):
        for part, wanted in zip(torch.split(ids, piece_len, 1), torch.split(targets, piece_len, 1), strict=True):
            hidden, state = model.read(part, state)
            logits = model.logits(hidden).transpose(1, 2)
            found.append(F.cross_entropy(logits, wanted, reduction="none"))
    return torch.cat(found, dim=1)
