"""Adam without weight decay (Kingma and Ba 2015), for a handful of tensors whose moments go into checkpoints."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

BETAS = (0.9, 0.99)
EPS = 1e-8


class Adam:
    """`first`, `second`: the moments of each parameter, in order."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = parameters
        self.first = [torch.zeros_like(parameter, requires_grad=False) for parameter in parameters]
        self.second = [torch.zeros_like(parameter, requires_grad=False) for parameter in parameters]
        self.num_steps = 0

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Moves all parameters that have a gradient, and drops the gradients."""
        self.num_steps += 1
        for parameter, first, second in zip(self._parameters, self.first, self.second, strict=True):
            gradient = parameter.grad
            if gradient is None:
                continue
            first.lerp_(gradient, 1 - BETAS[0])
            second.lerp_(gradient.square(), 1 - BETAS[1])
            mean = first / (1 - BETAS[0] ** self.num_steps)
            deviation = (second / (1 - BETAS[1] ** self.num_steps)).sqrt()
            parameter.sub_(rate * mean / (deviation + EPS))
            parameter.grad = None
