"""RWKV-7 to train: names, shapes and starting values are those of the official files (Peng et al. 2025, RWKV-LM)."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nsm_core.rwkv7.layouts import SHIFTS
from nsm_core.rwkv7.time_mix import MAX_DECAY
from nsm_lab.training.rwkv7.scan import trained_scan

HEAD_SIZE = 64
HEAD_NORM_EPS = 64e-5
SHIFT_POWERS = {"r": 0.2, "w": 0.9, "k": 0.7, "v": 0.7, "a": 0.9, "g": 0.2}


class TimeMix(nn.Module):
    """Small networks with a letter: `w` behind the decay, `a` the rate, `v` the share of the first layer's values, `g`
    the gate; each has a bias 0 (but the gate) and matrices 1 and 2."""

    w0: nn.Parameter
    w1: nn.Parameter
    w2: nn.Parameter
    a0: nn.Parameter
    a1: nn.Parameter
    a2: nn.Parameter
    v0: nn.Parameter
    v1: nn.Parameter
    v2: nn.Parameter
    g1: nn.Parameter
    g2: nn.Parameter

    def __init__(self, width: int, num_layers: int, index: int) -> None:
        super().__init__()
        channel = torch.arange(width)
        depth, left = index / max(1, num_layers - 1), 1.0 - index / num_layers
        for letter in SHIFTS:
            shift = 1.0 - (channel / width) ** (SHIFT_POWERS[letter] * left)
            setattr(self, f"x_{letter}", nn.Parameter(shift.view(1, 1, width)))
        along = channel / (width - 1)
        in_head = (channel % HEAD_SIZE) / ((HEAD_SIZE - 1) / 2) - 1.0
        in_head = in_head * in_head.abs()
        decay = -5.5 + 6.0 * along ** (1.0 + depth**0.3) + 2.5 * in_head
        self._add("w", decay, _rank(width, 1.8, 0.5))
        self._add("a", -0.19 + 0.3 * in_head + 0.4 * (along - 0.5), _rank(width, 1.8, 0.5))
        if index > 0:
            self._add("v", 0.73 - 0.4 * (along - 0.5), _rank(width, 1.3, 0.5))
        self._add("g", None, _rank(width, 0.6, 0.8), width)
        self.k_k = nn.Parameter((0.71 - 0.1 * (along - 0.5)).view(1, 1, width))
        self.k_a = nn.Parameter(torch.full((1, 1, width), 1.02))
        self.r_k = nn.Parameter(torch.full((width // HEAD_SIZE, HEAD_SIZE), -0.04))
        self.receptance = _linear(width, width, 0.5)
        self.key = _linear(width, width, 0.05)
        self.value = _linear(width, width, 0.5)
        self.output = _linear(width, width, 0.0)
        self.ln_x = nn.GroupNorm(width // HEAD_SIZE, width, eps=HEAD_NORM_EPS)

    def _add(self, letter: str, bias: Tensor | None, rank: int, width: int | None = None) -> None:
        """A small network, whose first matrix begins at zero."""
        width = width or (0 if bias is None else len(bias))
        if bias is not None:
            setattr(self, f"{letter}0", nn.Parameter(bias.view(1, 1, width)))
        setattr(self, f"{letter}1", nn.Parameter(torch.zeros(width, rank)))
        setattr(self, f"{letter}2", nn.Parameter(_orthogonal(rank, width, 0.1)))

    def forward(self, x: Tensor, first_value: Tensor | None) -> tuple[Tensor, Tensor]:
        """x [B,T,D], normalised, a text's start -> the output and the values that the first layer hands on."""
        heads, size = self.r_k.shape
        step = F.pad(x, (0, 0, 1, -1)) - x
        x_r, x_w, x_k, x_v, x_a, x_g = (x + step * getattr(self, f"x_{letter}").to(x.dtype) for letter in SHIFTS)
        r, k, v = self.receptance(x_r), self.key(x_k), self.value(x_v)
        decay, rate = torch.tanh(x_w @ self.w1) @ self.w2, x_a @ self.a1 @ self.a2
        gate = torch.sigmoid(x_g @ self.g1) @ self.g2
        mix = None if first_value is None else x_v @ self.v1 @ self.v2
        with torch.autocast(x.device.type, enabled=False):
            r, k, v = r.float(), k.float(), v.float()
            w = torch.exp(-MAX_DECAY * torch.sigmoid(self.w0 + decay.float()))
            rate = torch.sigmoid(self.a0 + rate.float())
            if first_value is None or mix is None:
                first_value = v
            else:
                v = v + (first_value - v) * torch.sigmoid(self.v0 + mix.float())
            removed = F.normalize(torch.unflatten(k * self.k_k, -1, (heads, size)), dim=-1)
            k = k * (1.0 + (rate - 1.0) * self.k_a)
            r, w, k, own, rate = (torch.unflatten(part, -1, (heads, size)) for part in (r, w, k, v, rate))
            y = trained_scan(r=r, w=w, k=k, v=own, removed=removed, rate=rate)
            y = F.layer_norm(y, (size,), eps=HEAD_NORM_EPS).flatten(-2) * self.ln_x.weight + self.ln_x.bias
            y = y + ((r * k * self.r_k).sum(-1, keepdim=True) * own).flatten(-2)
        out: Tensor = self.output(y.to(gate.dtype) * gate)
        return out, first_value


class ChannelMix(nn.Module):
    def __init__(self, width: int, num_layers: int, index: int) -> None:
        super().__init__()
        shift = 1.0 - (torch.arange(width) / width) ** ((1.0 - index / num_layers) ** 4)
        self.x_k = nn.Parameter(shift.view(1, 1, width))
        self.key, self.value = _linear(width, 4 * width, 0.5), _linear(4 * width, width, 0.0)

    def forward(self, x: Tensor) -> Tensor:
        step = F.pad(x, (0, 0, 1, -1)) - x
        out: Tensor = self.value(torch.relu(self.key(x + step * self.x_k.to(x.dtype))).square())
        return out


class Layer(nn.Module):
    def __init__(self, width: int, num_layers: int, index: int) -> None:
        super().__init__()
        self.ln0 = nn.LayerNorm(width) if index == 0 else None
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.att, self.ffn = TimeMix(width, num_layers, index), ChannelMix(width, num_layers, index)

    def forward(self, x: Tensor, first_value: Tensor | None) -> tuple[Tensor, Tensor]:
        x = x if self.ln0 is None else self.ln0(x)
        mixed, first_value = self.att(self.ln1(x), first_value)
        x = x + mixed
        return x + self.ffn(self.ln2(x)), first_value


class Rwkv7(nn.Module):
    """Reads texts from their start. `state_dict` is what an official file holds."""

    def __init__(self, vocab_size: int, width: int, num_layers: int) -> None:
        super().__init__()
        self.emb = nn.Embedding(vocab_size, width)
        nn.init.uniform_(self.emb.weight, -1e-4, 1e-4)
        self.blocks = nn.ModuleList(Layer(width, num_layers, index) for index in range(num_layers))
        self.ln_out, self.head = nn.LayerNorm(width), nn.Linear(width, vocab_size, bias=False)
        with torch.no_grad():
            self.head.weight.copy_(_orthogonal(vocab_size, width, 0.5))

    def forward(self, ids: Tensor) -> Tensor:
        """ids [B,T] -> logits [B,T,vocabulary]."""
        x: Tensor = self.emb(ids)
        first_value: Tensor | None = None
        for block in self.blocks:
            x, first_value = block(x, first_value)
        logits: Tensor = self.head(self.ln_out(x))
        return logits


def _rank(width: int, factor: float, power: float) -> int:
    return max(32, 32 * round(factor * math.pow(width, power) / 32))


def _linear(inner: int, outer: int, bound: float) -> nn.Linear:
    linear = nn.Linear(inner, outer, bias=False)
    limit = bound * min(inner, outer) ** -0.5
    nn.init.uniform_(linear.weight, -limit, limit)
    return linear


def _orthogonal(rows: int, columns: int, scale: float) -> Tensor:
    return nn.init.orthogonal_(torch.empty(rows, columns), gain=scale * max(1.0, math.sqrt(rows / columns)))
