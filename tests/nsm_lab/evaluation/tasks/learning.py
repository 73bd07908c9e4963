"""Training on public tasks, small enough for a test."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from nsm_core.config import ModelConfig
from nsm_core.model.nsm import NsmModel

# (token ids of right-padded rows [B,T], their lengths [B], the token to answer with [B])
Examples = tuple[Tensor, Tensor, Tensor]


def tiny_model(vocab_size: int, **fields: object) -> NsmModel:
    torch.manual_seed(0)
    shape = {
        "d_model": 32, "num_layers": 1, "num_heads": 2, "num_memory_slots": 16, "router": "sigmoid", "write_top_k": 16,
        "mlp_hidden": 64, "num_kv_heads": 2, "window": 8,
    }  # fmt: skip
    return NsmModel(ModelConfig.from_dict({"vocab_size": vocab_size, **shape, **fields}))


def as_examples(rows: Sequence[Sequence[str]], answers: Sequence[str], vocabulary: Sequence[str]) -> Examples:
    number = {token: index for index, token in enumerate(vocabulary)}
    lengths = torch.tensor([len(row) for row in rows])
    ids = torch.zeros(len(rows), int(lengths.max()), dtype=torch.int64)
    for row, tokens in enumerate(rows):
        ids[row, : len(tokens)] = torch.tensor([number[token] for token in tokens])
    return ids, lengths, torch.tensor([number[answer] for answer in answers])


def answer_logits(model: NsmModel, examples: Examples) -> Tensor:
    ids, lengths, _ = examples
    hidden, _ = model(ids, model.initial_state(len(ids)), lengths)
    return model.logits(hidden[torch.arange(len(ids)), lengths - 1])


def learn(model: NsmModel, draw: Callable[[], Examples], *, steps: int, lr: float = 1e-2) -> None:
    fit(model, lambda: _answer_loss(model, draw()), steps=steps, lr=lr)


def _answer_loss(model: NsmModel, examples: Examples) -> Tensor:
    return F.cross_entropy(answer_logits(model, examples), examples[2])


def fit(model: NsmModel, loss_of: Callable[[], Tensor], *, steps: int, lr: float) -> None:
    """Warm-up over a tenth of the steps, a fall to zero over the last third."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    model.train()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1.0, 10 * (step + 1) / steps, 3 * (steps - step) / steps)
        optimizer.zero_grad()
        loss_of().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.eval()


@torch.no_grad()
def accuracy(model: NsmModel, examples: Examples) -> float:
    model.eval()
    return float((answer_logits(model, examples).argmax(-1) == examples[2]).float().mean())


def best_guess(examples: Examples) -> float:
    """Accuracy of always saying the commonest answer."""
    return float(examples[2].bincount().max() / len(examples[2]))
