"""An exponential moving average of the weights: the model that is validated and saved when `ema` is above 0."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn


class WeightAverage:
    """Shadow weights that follow a model's parameters. `decay` is the share of the old average that a step leaves.

    Early on the average follows faster, with decay (1 + n) / (10 + n) after n steps: the first weights are no good.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self._decay, self._num_updates = decay, 0
        self._names = [name for name, _ in model.named_parameters()]
        self._weights = [parameter.detach() for parameter in model.parameters()]
        self._shadow = [weight.clone() for weight in self._weights]

    @torch.no_grad()
    def update(self) -> None:
        """Called after each step of the optimiser."""
        self._num_updates += 1
        decay = min(self._decay, (1 + self._num_updates) / (10 + self._num_updates))
        torch._foreach_lerp_(self._shadow, self._weights, 1.0 - decay)

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Inside, the model has the averaged weights."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def tensors(self) -> dict[str, Tensor]:
        """Tensors for a resumed run, by name."""
        return {"num_updates": torch.tensor(self._num_updates), **dict(zip(self._names, self._shadow, strict=True))}

    @torch.no_grad()
    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        """The inverse of `tensors`."""
        self._num_updates = int(tensors["num_updates"])
        for name, shadow in zip(self._names, self._shadow, strict=True):
            shadow.copy_(tensors[name])

    @torch.no_grad()
    def _swap(self) -> None:
        saved = [weight.clone() for weight in self._weights]
        torch._foreach_copy_(self._weights, self._shadow)
        torch._foreach_copy_(self._shadow, saved)
