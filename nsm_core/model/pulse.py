"""The PULSE linear-gate layer: routed slot memory (docs/model.md, equations 1-6)."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nsm_core.config import ModelConfig
from nsm_core.model.mixer import Mixer
from nsm_core.model.segments import Segments
from nsm_core.ops.slot_scan.chunked import CHUNK_LEN, LOG_DECAY_MIN, slot_scan_chunked
from nsm_core.ops.slot_scan.step import slot_step
from nsm_core.state.spec import State

# Heads forget at different speeds from the start: softplus(bias) of the write strength runs over this range.
WRITE_STRENGTH_RANGE = (0.03, 2.0)
TIMESCALE_BASE = 4.0


def _inverse_softplus(x: Tensor) -> Tensor:
    return x + torch.log(-torch.expm1(-x))


class CausalConv(nn.Module):
    """Depthwise causal convolution over a few tokens, per channel; its tail is carried state."""

    def __init__(self, channels: int, taps: int) -> None:
        super().__init__()
        weight = 0.1 * torch.randn(taps, channels)
        weight[-1] += 0.7
        self.weight = nn.Parameter(weight)

    def forward(self, x: Tensor, tail: Tensor, segments: Segments) -> tuple[Tensor, Tensor]:
        """x [B,T,D], tail [B,taps-1,D] -> y [B,T,D] and the tail after each row's last valid token."""
        taps, num_tokens = self.weight.shape[0], x.shape[1]
        joined = torch.cat((tail.to(x.dtype), x), dim=1)
        y = torch.zeros_like(x)
        for back in range(taps):
            start = taps - 1 - back
            shifted = joined[:, start : start + num_tokens]
            if segments.reset is not None and back > 0:
                shifted = torch.where(self._crosses_start(segments.reset, num_tokens, back), 0.0, shifted)
            y = y + self.weight[start] * shifted
        return y, self._new_tail(joined, segments.lengths).to(tail.dtype)

    @staticmethod
    def _crosses_start(reset: Tensor, num_tokens: int, back: int) -> Tensor:
        """[B,T,1] bool: the token `back` places earlier belongs to the document before."""
        offset = torch.arange(num_tokens, device=reset.device) % CHUNK_LEN
        starts = reset.repeat_interleave(CHUNK_LEN, dim=1)
        return (starts & (offset < back))[..., None]

    def _new_tail(self, joined: Tensor, lengths: Tensor | None) -> Tensor:
        taps = self.weight.shape[0]
        if lengths is None:
            return joined[:, -(taps - 1) :]
        index = lengths[:, None] + torch.arange(taps - 1, device=lengths.device)
        return joined.gather(1, index[..., None].expand(-1, -1, joined.shape[-1]))

    def step(self, x: Tensor, tail: Tensor) -> tuple[Tensor, Tensor]:
        """x [B,D], tail [B,taps-1,D] -> y [B,D] and the new tail."""
        window = torch.cat((tail, x[:, None]), dim=1)
        return (window * self.weight).sum(dim=1), window[:, 1:]


class Router(nn.Module):
    """Which slots a token writes to and how strongly: equations (2) and (3). Always in fp32.

    Rounding here would move slot choices, and with them the text, between batch shapes.
    """

    selection_bias: Tensor
    slot_load: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        heads, slots = config.num_heads, config.num_memory_slots
        self.heads, self.slots, self.top_k, self.taper = heads, slots, config.write_top_k, config.taper
        self.logits = nn.Linear(config.d_model, heads * slots)
        self.strength = nn.Linear(config.d_model, heads)
        groups = torch.arange(slots) * config.timescale_groups // slots
        self.log_timescale = nn.Parameter((-math.log(TIMESCALE_BASE) * groups).repeat(heads, 1))
        self.register_buffer("selection_bias", torch.zeros(heads, slots))
        self.register_buffer("slot_load", torch.empty(heads, slots), persistent=False)
        self.reset_load()
        self._init_weights(config)

    def _init_weights(self, config: ModelConfig) -> None:
        nn.init.normal_(self.logits.weight, std=config.d_model**-0.5)
        nn.init.zeros_(self.logits.bias)
        nn.init.normal_(self.strength.weight, std=0.1 * config.d_model**-0.5)
        low, high = (math.log(bound) for bound in WRITE_STRENGTH_RANGE)
        with torch.no_grad():
            self.strength.bias.copy_(_inverse_softplus(torch.linspace(low, high, self.heads).exp()))

    def routing(self, x: Tensor) -> Tensor:
        """x [..., d] -> write distribution [..., H, M], at most top_k non-zeros, summing to 1."""
        logits = torch.unflatten(self.logits(x), -1, (self.heads, self.slots))
        if self.top_k == self.slots:
            return torch.softmax(logits, dim=-1)
        scores = logits + self.selection_bias
        threshold = scores.detach().topk(self.top_k + 1, dim=-1).values[..., -1:]
        # The marginal slot's weight is zero at a tie: selection is continuous in the logits. Value only, no gradient.
        fade = -torch.expm1(-(scores.detach() - threshold).clamp(min=0.0) / self.taper)
        if self.training:
            self._track_load(fade)
        weights: Tensor = (logits - logits.detach().amax(dim=-1, keepdim=True)).exp() * fade
        return weights / weights.sum(dim=-1, keepdim=True)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [..., d] -> log decay g <= 0 and write weight w = 1 - exp(g), both [..., H, M]."""
        with torch.autocast(x.device.type, enabled=False):
            x = x.to(self.logits.weight.dtype)
            routing = self.routing(x)
            strength = F.softplus(self.strength(x))[..., None]
            log_decay = (-self.log_timescale.exp() * strength * routing).clamp(min=LOG_DECAY_MIN)
            return log_decay, -torch.expm1(log_decay)

    def reset_load(self) -> None:
        """The load of every slot is its fair share again, as at the start of training."""
        self.slot_load.fill_(self.top_k / self.slots)

    def _track_load(self, fade: Tensor) -> None:
        selected = (fade > 0).flatten(0, -3).to(self.slot_load.dtype).mean(dim=0)
        self.slot_load.lerp_(selected, 0.01)

    @torch.no_grad()
    def rescue_dead_slots(self, rate: float = 1e-3) -> None:
        """Raise the selection bias of slots that are hardly ever chosen, lower that of slots that always are."""
        fair = self.top_k / self.slots
        self.selection_bias += rate * ((self.slot_load < 0.1 * fair).float() - (self.slot_load > 0.9).float())


class PulseMixer(Mixer):
    """Routed slot memory: conv, sparse convex writes, softmax read, output gate."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        d, heads, slots, head_dim = config.d_model, config.num_heads, config.num_memory_slots, config.head_dim
        self.heads, self.head_dim, self.eps = heads, head_dim, config.norm_eps
        self.project = nn.Linear(d, 4 * d, bias=False)  # q, k, v and the output gate z
        self.conv = CausalConv(3 * d, config.conv_taps)
        self.router = Router(config)
        self.log_scale = nn.Parameter(torch.zeros(heads))
        initial = torch.zeros(heads, slots, 2 * head_dim)
        initial[..., :head_dim].normal_(std=0.5)
        self.initial_slots = nn.Parameter(initial)
        self.out_norm = nn.Parameter(torch.ones(d))
        self.out = nn.Linear(d, d, bias=False)
        nn.init.normal_(self.project.weight, std=d**-0.5)
        nn.init.zeros_(self.out.weight)

    @property
    def scale(self) -> Tensor:
        return self.log_scale.exp() * (2.0 / math.sqrt(self.head_dim))

    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        taps, channels = self.conv.weight.shape
        return {"slots": tuple(self.initial_slots.shape), "conv_tail": (taps - 1, channels)}

    def initial_state(self, batch_size: int) -> State:
        slots = self.initial_slots.to(torch.float32)
        tail = torch.zeros(batch_size, *self.state_shapes()["conv_tail"], device=slots.device)
        return {"slots": slots.expand(batch_size, -1, -1, -1).clone(), "conv_tail": tail}

    def _heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = torch.unflatten(F.silu(qkv), -1, (3, self.heads, self.head_dim)).unbind(-3)
        normed = (self.head_dim,)
        return F.rms_norm(q, normed, eps=self.eps), F.rms_norm(k, normed, eps=self.eps), v

    def _output(self, read: Tensor, gate: Tensor) -> Tensor:
        normed = F.rms_norm(read, (self.head_dim,), eps=self.eps).flatten(-2) * self.out_norm
        out: Tensor = self.out(normed * F.silu(gate))
        return out

    def forward(self, x: Tensor, state: State, segments: Segments) -> tuple[Tensor, State]:
        """state: slots [B,H,M,2K], conv_tail [B,taps-1,3d]."""
        qkv, gate = self.project(x).split((3 * x.shape[-1], x.shape[-1]), dim=-1)
        qkv, tail = self.conv(qkv, state["conv_tail"], segments)
        q, k, v = self._heads(qkv)
        log_decay, write = self.router(x)
        if segments.valid is not None:
            keep = segments.valid[..., None, None]
            log_decay, write = torch.where(keep, log_decay, 0.0), torch.where(keep, write, 0.0)
        read, slots = slot_scan_chunked(
            q=q,
            k=k,
            v=v,
            log_decay=log_decay,
            write=write,
            scale=self.scale,
            state=state["slots"],
            reset=segments.reset,
            initial=self.initial_slots,
        )
        return self._output(read, gate), {"slots": slots, "conv_tail": tail}

    def step(self, x: Tensor, state: State, positions: Tensor) -> tuple[Tensor, State]:
        qkv, gate = self.project(x).split((3 * x.shape[-1], x.shape[-1]), dim=-1)
        qkv, tail = self.conv.step(qkv, state["conv_tail"])
        q, k, v = self._heads(qkv)
        _, write = self.router(x)
        read, slots = slot_step(q=q, k=k, v=v, write=write, scale=self.scale, state=state["slots"])
        return self._output(read, gate), {"slots": slots, "conv_tail": tail}
