"""Which slots a token writes to and how strongly (docs/model.md, equations 2 and 3)."""

from __future__ import annotations

import abc
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nsm_core.config import ModelConfig
from nsm_core.model.balance import Penalties, balance_loss, token_mean
from nsm_core.ops.routing.route import route
from nsm_core.ops.slot_scan.chunked import LOG_DECAY_MIN

# Heads forget at different speeds from the start: softplus(bias) of the write strength runs over this range.
WRITE_STRENGTH_RANGE = (0.03, 2.0)
TIMESCALE_BASE = 4.0
NEVER = -1e30  # the logit of a slot that is not in use; finite, because a difference of two infinities is no number
# The slots of a sigmoid router write at these rates at the start, evenly spaced on a log scale.
WRITE_RATE_RANGE = (0.002, 0.2)


def build_router(config: ModelConfig) -> Router:
    """The router of one layer."""
    return SigmoidRouter(config) if config.router == "sigmoid" else SoftmaxRouter(config)


class Router(nn.Module, abc.ABC):
    """x [..., d] -> log decay g <= 0 [..., H, M]; the write weight is 1 - exp(g). Always in fp32.

    Rounding here would move slot choices, and with them the text, between batch shapes.

    In training it measures how its slots are used; with `has_penalties` it also leaves the penalties of each call in
    `penalties`, for the loss.
    """

    slot_use: Tensor
    num_measured: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads, self.slots, self.top_k = config.num_heads, config.num_memory_slots, config.write_top_k
        self.logits = nn.Linear(config.d_model, self.heads * self.slots)
        nn.init.normal_(self.logits.weight, std=config.d_model**-0.5)
        nn.init.zeros_(self.logits.bias)
        self.has_penalties = False
        self.penalties: list[Penalties] = []
        # sums over the calls since the last reset: load, write weights and log decay of a slot at a token
        self.register_buffer("slot_use", torch.zeros(3, self.heads, self.slots), persistent=False)
        self.register_buffer("num_measured", torch.zeros(()), persistent=False)

    @abc.abstractmethod
    def chosen(self, log_decay: Tensor) -> Tensor:
        """log decay [..., H, M] -> each slot's load at a token [..., H, M]."""

    @abc.abstractmethod
    def scores(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """logits [..., H, M] -> the balance penalty's scores [..., H, M], and the log partitions of the choices."""

    @abc.abstractmethod
    def log_decay(self, x: Tensor, logits: Tensor, valid: Tensor | None) -> Tensor:
        """x [..., d] and logits [..., H, M] fp32 -> log decay [..., H, M]; 0 where `valid` [...] is False."""

    def forward(self, x: Tensor, valid: Tensor | None = None, active: Tensor | None = None) -> Tensor:
        """`valid` [...] bool: tokens that are none write nothing. `active` [..., H, M] bool: slots in use."""
        with torch.autocast(x.device.type, enabled=False):
            x = x.to(self.logits.bias.dtype)
            logits = torch.unflatten(self.logits(x), -1, (self.heads, self.slots))
            if active is not None:
                logits = logits.masked_fill(~active, NEVER)
            log_decay = self.log_decay(x, logits, valid)
            if active is not None:
                log_decay = torch.where(active, log_decay, 0.0)
            if self.training:
                self._measure(logits, log_decay, valid)
            return log_decay

    def _measure(self, logits: Tensor, log_decay: Tensor, valid: Tensor | None) -> None:
        load = self.chosen(log_decay)
        if self.has_penalties:
            probability, partition = self.scores(logits)
            mean_partition = token_mean(partition.square(), valid).mean()
            self.penalties.append(
                Penalties(balance_loss(token_mean(load, valid), token_mean(probability, valid)), mean_partition)
            )
        log_decay = log_decay.detach()
        seen = (load.detach(), -torch.expm1(log_decay), log_decay)
        means = torch.stack([token_mean(x, valid) for x in seen])
        self.slot_use += means
        self.num_measured += 1
        self.follow_load(means[0])

    def take_use(self) -> Tensor | None:
        """The means [3, H, M] of the measurements since the last call, which are reset; None without any."""
        if not self.num_measured:
            return None
        use = self.slot_use / self.num_measured
        self.slot_use.zero_()
        self.num_measured.zero_()
        return use

    def follow_load(self, load: Tensor) -> None:
        """load [H, M]: of the tokens of one call."""

    def reset_load(self) -> None:
        """Resets the measurements of the slots' use in training."""
        self.slot_use.zero_()
        self.num_measured.zero_()

    def rescue_dead_slots(self) -> None:
        """After a training step: slots that are hardly ever chosen get a better chance."""


def _ranks(config: ModelConfig) -> Tensor:
    """[M]: where each slot stands in the range of time scales, from 0 to M - 1.

    In order; in a model that may be read with its first slots only, so that these span the range too: bits reversed.
    """
    index = torch.arange(config.num_memory_slots)
    if not config.state_tiers:
        return index
    num_bits = (config.num_memory_slots - 1).bit_length()
    turned = sum(((index >> bit) & 1) << (num_bits - 1 - bit) for bit in range(num_bits))
    return torch.as_tensor(turned).argsort().argsort()


def _inverse_softplus(x: Tensor) -> Tensor:
    return x + torch.log(-torch.expm1(-x))


class SoftmaxRouter(Router):
    """Tapered top-k softmax times a write strength: equations (2) and (3)."""

    selection_bias: Tensor
    slot_load: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.taper = config.taper
        self.strength = nn.Linear(config.d_model, self.heads)
        nn.init.normal_(self.strength.weight, std=0.1 * config.d_model**-0.5)
        low, high = (math.log(bound) for bound in WRITE_STRENGTH_RANGE)
        with torch.no_grad():
            self.strength.bias.copy_(_inverse_softplus(torch.linspace(low, high, self.heads).exp()))
        groups = _ranks(config) * config.timescale_groups // self.slots
        self.log_timescale = nn.Parameter((-math.log(TIMESCALE_BASE) * groups).repeat(self.heads, 1))
        self.register_buffer("selection_bias", torch.zeros(self.heads, self.slots))
        self.register_buffer("slot_load", torch.empty(self.heads, self.slots), persistent=False)
        self.reset_load()

    def log_decay(self, x: Tensor, logits: Tensor, valid: Tensor | None) -> Tensor:
        return route(
            logits=logits,
            strength=self.strength(x),
            selection_bias=self.selection_bias,
            log_timescale=self.log_timescale,
            top_k=self.top_k,
            taper=self.taper,
            valid=valid,
        )

    def chosen(self, log_decay: Tensor) -> Tensor:
        return (log_decay < 0).to(log_decay.dtype)

    def scores(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        return logits.softmax(dim=-1), logits.logsumexp(dim=-1, keepdim=True)

    def reset_load(self) -> None:
        """The load of every slot is its fair share again, as at the start of training."""
        super().reset_load()
        self.slot_load.fill_(self.top_k / self.slots)

    def follow_load(self, load: Tensor) -> None:
        self.slot_load.lerp_(load, 0.01)

    @torch.no_grad()
    def rescue_dead_slots(self, rate: float = 1e-3) -> None:
        """Raise the selection bias of slots that are hardly ever chosen, lower that of slots that always are."""
        fair = self.top_k / self.slots
        self.selection_bias += rate * ((self.slot_load < 0.1 * fair).float() - (self.slot_load > 0.9).float())


class SigmoidRouter(Router):
    """Every slot decides for itself: w = sigmoid(l), so that g = -softplus(l). Slots do not compete for a token.

    The dense gate of gated slot attention (GSA, Zhang et al. 2024), with rates spread over the slots from the start in
    place of its damping.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        low, high = (math.log(bound) for bound in WRITE_RATE_RANGE)
        rates = torch.linspace(low, high, self.slots).exp()[_ranks(config)]
        with torch.no_grad():
            self.logits.bias.copy_(torch.logit(rates).repeat(self.heads))

    def chosen(self, log_decay: Tensor) -> Tensor:
        return -torch.expm1(log_decay)

    def scores(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        return torch.sigmoid(logits), F.softplus(logits)  # of each slot's choice between 0 and its logit

    def log_decay(self, x: Tensor, logits: Tensor, valid: Tensor | None) -> Tensor:
        log_decay = -F.softplus(logits).clamp(max=-LOG_DECAY_MIN)
        return log_decay if valid is None else torch.where(valid[..., None, None], log_decay, 0.0)
