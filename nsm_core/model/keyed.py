"""Keyed slot memory: a token's route is a key, and a write to it first removes the value that the slots hold for it
(benchmarks/notes/layers.md, "Keyed slots")."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nsm_core.config import ModelConfig
from nsm_core.model.mixer import Mixer, init_projections
from nsm_core.model.segments import Segments, valid_tokens
from nsm_core.ops.keyed_scan.dispatch import keyed_scan
from nsm_core.ops.keyed_scan.reference import keyed_step
from nsm_core.ops.short_conv.conv import context_conv
from nsm_core.ops.short_conv.reference import next_tail
from nsm_core.state.spec import State

# A write of strength b moves the answer for its own key by the share b, and that for an unrelated key by b / M. So a
# head forgets within about M / b tokens; heads start between these strengths, evenly spaced on a log scale.
STRENGTH_RANGE = (0.5, 0.01)
# Tokens after which the decay alone leaves 1 / e of a head's slots, at the start.
TIMESCALE_RANGE = (1e3, 1e5)
# A token is written to the route of the tokens before it, which is where the token before looked for it.
ROUTE_TAPS = (0.7, 0.4, 0.2)


def unit_route(logits: Tensor) -> Tensor:
    """logits [..., M] -> a route of unit length [..., M]. Of both signs: routes of one sign all resemble each other."""
    return F.normalize(logits, dim=-1)


def crowding(routes: Tensor) -> Tensor:
    """routes [..., H, M] of unit length -> [], the mean over heads of log(M / dimensions that the routes take up).

    0 when they are spread evenly over all M, log M when all are the same. The dimensions are the participation ratio
    of their second moments.
    """
    flat = routes.flatten(0, -3).float()
    moments = torch.einsum("nhi,nhj->hij", flat, flat) / flat.shape[0]
    return (routes.shape[-1] * moments.square().sum(dim=(-1, -2))).log().mean()


class ContextTaps(nn.Module):
    """Weights [taps, channels] of the convolutions, their last row for the token itself: of routes that are read, of
    routes that are written, and of values."""

    def __init__(self, taps: int, routes: int, values: int) -> None:
        super().__init__()
        self.read = nn.Parameter(0.02 * torch.randn(taps, routes))
        self.write = nn.Parameter(0.02 * torch.randn(taps, routes))
        self.value = nn.Parameter(0.1 * torch.randn(taps, values))
        with torch.no_grad():
            self.value[-1] += 0.7
            for back, share in enumerate(ROUTE_TAPS[: taps - 1]):
                self.read[-1 - back] += share
                self.write[-2 - back] += share


class KeyedMixer(Mixer):
    """Slots that learn, token by token, what follows a context.

    A head holds M slots of V numbers. The route of a context, of the last few tokens, is a key over the slots. A token
    reads with the route of the context that it ends; the next token's value is then written with the same route: what
    the slots answer for it moves to that value by the head's strength. So the value read is a prediction from all that
    was read before, and the write corrects it.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        d, self.heads, self.slots = config.d_model, config.num_heads, config.num_memory_slots
        self.width, self.eps = config.slot_width or config.head_dim, config.norm_eps
        inner, routes = self.heads * self.width, self.heads * self.slots
        self.project = nn.Linear(d, routes + 2 * inner, bias=False)  # route, value, gate
        self.conv = ContextTaps(config.conv_taps, routes, inner)
        self.rates = nn.Linear(d, 2 * self.heads)  # of a head: strength, decay
        nn.init.normal_(self.rates.weight, std=0.1 * d**-0.5)
        with torch.no_grad():
            strength = _log_spaced(STRENGTH_RANGE, self.heads)
            decay = 1.0 / _log_spaced(TIMESCALE_RANGE, self.heads)
            self.rates.bias.copy_(torch.cat((torch.logit(strength), decay + torch.log(-torch.expm1(-decay)))))
        self.out_norm, self.skip = nn.Parameter(torch.ones(inner)), nn.Parameter(torch.ones(inner))
        self.out = nn.Linear(inner, d, bias=False)
        init_projections(self.project, out=self.out)
        # with `has_penalties`, each call in training leaves the crowding of its written routes here, for the loss
        self.has_penalties = False
        self.penalties: list[Tensor] = []

    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        """`slots` [H,M,V]; `conv_tail`: routes and values of the last tokens, before the convolution."""
        taps, routes = self.conv.read.shape
        channels = routes + self.conv.value.shape[1]
        return {"slots": (self.heads, self.slots, self.width), "conv_tail": (taps - 1, channels)}

    def initial_state(self, batch_size: int) -> State:
        device = self.out.weight.device
        return {name: torch.zeros(batch_size, *shape, device=device) for name, shape in self.state_shapes().items()}

    def forward(self, x: Tensor, state: State, segments: Segments) -> tuple[Tensor, State]:
        tokens, gate, tail = self.tokens(x, state["conv_tail"], segments)
        if self.training and self.has_penalties:
            self.penalties.append(crowding(tokens["k"]))
        read, slots = keyed_scan(**tokens, state=state["slots"], reset=segments.reset)
        return self._output(read, tokens["v"], gate), {"slots": slots, "conv_tail": tail}

    def step(self, x: Tensor, state: State, positions: Tensor) -> tuple[Tensor, State]:
        tokens, gate, tail = self.tokens(x[:, None], state["conv_tail"], Segments(positions[:, None]))
        token = {name: value[:, 0].to(state["slots"].dtype) for name, value in tokens.items()}
        read, slots = keyed_step(**token, state=state["slots"])
        return self._output(read, token["v"], gate[:, 0]), {"slots": slots, "conv_tail": tail}

    def shares(self, x: Tensor, tail: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Of tokens x [B,1,d] at `positions` [B], fp32 [B,H,M]: of each slot's own content the share that the write
        removes, and the squared route of the read.
        """
        tokens, _, _ = self.tokens(x, tail, Segments(positions[:, None]))
        token = {name: value[:, 0].float() for name, value in tokens.items()}
        return token["strength"][..., None] * token["k"].square(), token["q"].square()

    def tokens(self, x: Tensor, tail: Tensor, segments: Segments) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        """What `keyed_scan` reads of tokens x [B,T,d], their output gate, and the new tail."""
        inner = self.conv.value.shape[1]
        mixed, gate = torch.split(self.project(x), [tail.shape[-1], inner], dim=-1)
        with torch.autocast(x.device.type, enabled=False):
            tokens = self._rates(x, valid_tokens(x.shape[1], segments))
            joined = torch.cat((tail.to(mixed.dtype), mixed), dim=1)
            routes, values = torch.split(joined, [self.conv.read.shape[1], inner], dim=-1)
            tokens["q"], tokens["k"] = (
                self._route(routes, taps, segments.reset) for taps in (self.conv.read, self.conv.write)
            )
            value = context_conv(joined=values, weight=self.conv.value, reset=segments.reset, dtype=mixed.dtype)
            tokens["v"] = self._in_heads(value)
        return tokens, gate, next_tail(joined, tail.shape[1], segments.lengths).to(tail.dtype)

    def _route(self, routes: Tensor, taps: Tensor, reset: Tensor | None) -> Tensor:
        """routes [B, taps - 1 + T, HM] -> [B,T,H,M]."""
        logits = self._in_heads(context_conv(joined=routes, weight=taps, reset=reset, dtype=taps.dtype))
        return unit_route(logits).to(routes.dtype)

    def _rates(self, x: Tensor, valid: Tensor | None) -> dict[str, Tensor]:
        """Strength and log decay [B,T,H], in fp32 like all gates of a state; both 0 at padding."""
        strength, decay = self.rates(x.to(self.rates.weight.dtype)).chunk(2, dim=-1)
        rates = {"strength": torch.sigmoid(strength), "log_decay": -F.softplus(decay)}
        if valid is None:
            return rates
        return {name: torch.where(valid[..., None], rate, 0.0) for name, rate in rates.items()}

    def _in_heads(self, x: Tensor) -> Tensor:
        return torch.unflatten(x, -1, (self.heads, -1))

    def _output(self, read: Tensor, value: Tensor, gate: Tensor) -> Tensor:
        normed = F.rms_norm(read, (self.width,), eps=self.eps).flatten(-2) * self.out_norm
        out: Tensor = self.out(((normed + value.flatten(-2) * self.skip) * F.silu(gate)).to(gate.dtype))
        return out


def _log_spaced(bounds: tuple[float, float], count: int) -> Tensor:
    low, high = (math.log(bound) for bound in bounds)
    return torch.linspace(low, high, count).exp()
