"""LoRA (Hu et al. 2021), to compare tuned states with: a low-rank term for each large matrix of the layers.

Not served: a server would have to compute it for each request.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from nsm_core.errors import ConfigError
from nsm_core.loaded_model import LoadedModel, SequenceModel
from nsm_core.model.nsm import NsmModel
from nsm_core.rwkv7.model import Rwkv7Model
from nsm_core.rwkv7.weights import Weights
from nsm_core.tuning.adam import Adam
from nsm_core.tuning.config import TuneConfig
from nsm_core.tuning.examples import Example
from nsm_core.tuning.loss import mean_loss, num_targets, rows_of, split_by_tokens, summed_loss
from nsm_core.tuning.start import after_start_token

TIME_MIX_MATRICES = ("receptance", "key", "value", "output")
CHANNEL_MIX_MATRICES = ("key", "value")


class LowRankTerm(nn.Module):
    """W [out, in] -> W + up @ down, with `up` zero at the start."""

    def __init__(self, weight: Tensor, rank: int, generator: torch.Generator) -> None:
        super().__init__()
        down = torch.randn(rank, weight.shape[1], generator=generator) / math.sqrt(weight.shape[1])
        self.down = nn.Parameter(down.to(weight.device))
        self.up = nn.Parameter(torch.zeros(weight.shape[0], rank, device=weight.device))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.up @ self.down


class Lora:
    """Adapters of all projections of a model's layers; embeddings, gates and norms stay. Changes `loaded.model`.

    Raises ConfigError for a model of another family.
    """

    def __init__(self, loaded: LoadedModel[SequenceModel], *, rank: int, seed: int) -> None:
        self._model: Any = loaded.model
        self._generator = torch.Generator().manual_seed(seed)
        self._rank = rank
        if isinstance(loaded.model, NsmModel):
            self.terms = list(self._for_nsm(loaded.model))
        elif isinstance(loaded.model, Rwkv7Model):
            self._base = loaded.model.weights
            self._by_matrix = dict(self._for_rwkv7(self._base))
            self.terms = list(self._by_matrix.values())
        else:
            raise ConfigError(f"no adapters for a model of the architecture {loaded.architecture}")
        self.apply()

    @property
    def parameters(self) -> list[Tensor]:
        return [parameter for term in self.terms for parameter in term.parameters()]

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters)

    def apply(self) -> None:
        """Computes the matrices anew: before every forward pass in training. The NSM family does so by itself."""
        if isinstance(self._model, Rwkv7Model):
            self._model.__dict__["weights"] = self._adapted(self._base)  # the cached property's place

    def _for_nsm(self, model: NsmModel) -> Iterator[LowRankTerm]:
        linears = [module for module in model.blocks.modules() if isinstance(module, nn.Linear)]
        for linear in linears:
            if linear.weight.shape[0] > self._rank:
                term = LowRankTerm(linear.weight, self._rank, self._generator)
                parametrize.register_parametrization(linear, "weight", term)
                yield term

    def _for_rwkv7(self, weights: Weights) -> Iterator[tuple[tuple[int, str, str], LowRankTerm]]:
        for index, layer in enumerate(weights.layers):
            for part, names in (("time_mix", TIME_MIX_MATRICES), ("channel_mix", CHANNEL_MIX_MATRICES)):
                for name in names:
                    matrix = getattr(getattr(layer, part), name)
                    yield (index, part, name), LowRankTerm(matrix, self._rank, self._generator)

    def _adapted(self, base: Weights) -> Weights:
        layers = []
        for index, layer in enumerate(base.layers):
            parts = {}
            for part, names in (("time_mix", TIME_MIX_MATRICES), ("channel_mix", CHANNEL_MIX_MATRICES)):
                mixer = getattr(layer, part)
                changed = {name: self._by_matrix[index, part, name](getattr(mixer, name)) for name in names}
                parts[part] = dataclasses.replace(mixer, **changed)
            layers.append(dataclasses.replace(layer, **parts))
        return dataclasses.replace(base, layers=tuple(layers))


def train_lora(
    loaded: LoadedModel[SequenceModel],
    config: TuneConfig,
    train: Sequence[Example],
    held_out: Sequence[Example],
    *,
    rank: int,
) -> tuple[Lora, float]:
    """The adapters with the lowest held-out loss, and that loss; batches as `Tuner` has them for this config."""
    lora = Lora(loaded, rank=rank, seed=config.seed)
    start, adam = after_start_token(loaded), Adam(lora.parameters)
    best_loss, best, num_worse = math.inf, [parameter.detach().clone() for parameter in lora.parameters], 0
    num_steps, between = config.num_steps(len(train)), config.steps_between(len(train))
    for step in range(num_steps):
        lora_batch = config.batch(train, step)
        count = num_targets(lora_batch)
        for group in split_by_tokens(lora_batch, config.max_tokens_at_once):
            lora.apply()
            loss = summed_loss(loaded.model, start, rows_of(group, loaded.device)) / count
            loss.backward()  # type: ignore[no-untyped-call]
        adam.step(config.rate_at(step, num_steps))
        if (step + 1) % between and step + 1 < num_steps:
            continue
        held_out_loss = _held_out_loss(lora, loaded, held_out, config)
        if held_out_loss < best_loss:
            best_loss, num_worse = held_out_loss, 0
            best = [parameter.detach().clone() for parameter in lora.parameters]
        else:
            num_worse += 1
            if num_worse == config.patience:
                break
    with torch.no_grad():
        for parameter, value in zip(lora.parameters, best, strict=True):
            parameter.copy_(value)
        lora.apply()
    return lora, best_loss


def _held_out_loss(
    lora: Lora, loaded: LoadedModel[SequenceModel], held_out: Sequence[Example], config: TuneConfig
) -> float:
    with torch.no_grad():
        lora.apply()
        start = after_start_token(loaded)
        return mean_loss(loaded.model, start, held_out, device=loaded.device, max_tokens=config.max_tokens_at_once)
