"""Optimisers and the learning-rate schedule.

Muon for the matrices inside the blocks, AdamW for everything else, without decay: embeddings, routers, convolutions,
gates of heads, norms and learned states (docs/training.md).
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from nsm_lab.training.config import TrainConfig

# Linear maps whose rows are scores, each of a slot or a head by itself, and no map between features
SCORES = frozenset({"router", "read_bias", "count", "rates"})


class Optimizers:
    """Muon and AdamW driven as one."""

    def __init__(self, model: nn.Module, config: TrainConfig) -> None:
        named = dict(model.named_parameters())
        matrices = muon_matrices(model)
        self.parameters = list(named.values())
        self._muon = torch.optim.Muon(
            [named[name] for name in matrices], lr=config.muon_lr, weight_decay=config.weight_decay, momentum=0.95
        )
        self._adam = torch.optim.AdamW(
            [value for name, value in named.items() if name not in set(matrices)],
            lr=config.adam_lr,
            betas=(0.9, 0.95),
            eps=1e-10,
            weight_decay=0.0,
        )
        self._base = {"muon": config.muon_lr, "adam": config.adam_lr}
        self._config = config

    @property
    def named(self) -> dict[str, torch.optim.Optimizer]:
        return {"muon": self._muon, "adam": self._adam}

    def step(self, step: int) -> tuple[float, Tensor]:
        """Clips, applies and clears the gradients; returns the learning-rate factor and the norm [] before clipping."""
        norm = nn.utils.clip_grad_norm_(self.parameters, self._config.clip)
        factor = lr_factor(step, self._config)
        for name, optimizer in self.named.items():
            for group in optimizer.param_groups:
                group["lr"] = self._base[name] * factor
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return factor, norm

    def tensors(self) -> dict[str, Tensor]:
        """The optimisers' memory as named tensors."""
        flat: dict[str, Tensor] = {}
        for name, optimizer in self.named.items():
            for index, values in optimizer.state_dict()["state"].items():
                flat.update({f"{name}.{index}.{key}": torch.as_tensor(value) for key, value in values.items()})
        return flat

    def load_tensors(self, flat: dict[str, Tensor]) -> None:
        """The inverse of `tensors`."""
        for name, optimizer in self.named.items():
            state: dict[int, dict[str, Tensor]] = {}
            for full_name in _with_prefix(flat, name + "."):
                _, index, key = full_name.split(".", 2)
                state.setdefault(int(index), {})[key] = flat[full_name]
            optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def muon_matrices(model: nn.Module) -> list[str]:
    """Names of the weights of linear maps between features, however deep in a layer of several mixers; in order."""
    return [
        f"{path}.weight"
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear) and not SCORES & set(path.split("."))
    ]


def _with_prefix(names: Iterable[str], prefix: str) -> list[str]:
    return [name for name in names if name.startswith(prefix)]


def lr_factor(step: int, config: TrainConfig) -> float:
    """Share of the peak learning rate at `step` (from 0)."""
    done = (step + 1) / config.steps
    if config.warmup > 0 and done < config.warmup:
        return done / config.warmup
    if config.schedule == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * min(1.0, done)))
    if config.decay > 0 and done > 1.0 - config.decay:
        return max(0.0, (1.0 - done) / config.decay)
    return 1.0
