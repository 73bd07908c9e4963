"""The mixers of an RWKV-7 layer in plain PyTorch, fp32: the specification of every kernel.

Peng et al. 2025, "RWKV-7 Goose with Expressive Dynamic State Evolution" (arXiv 2503.14456).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from nsm_core.rwkv7.weights import ChannelMix, LowRank, Norm, TimeMix

MAX_DECAY = math.exp(-0.5)  # the largest -log(w): a channel keeps at least exp(-0.607) = 0.545 of itself at a token


def layer_norm(x: Tensor, norm: Norm, eps: float) -> Tensor:
    """x [..., D] -> [..., D]."""
    return F.layer_norm(x, x.shape[-1:], norm.weight, norm.bias, eps)


def shifted(x: Tensor, before: Tensor) -> Tensor:
    """x [B,T,D] and the token before each row [B,D] -> the token before each token [B,T,D]."""
    return torch.cat((before[:, None], x[:, :-1]), dim=1)


def last_tokens(x: Tensor, before: Tensor, lengths: Tensor | None) -> Tensor:
    """The last of each row's tokens [B,D]: of x [B,T,D], or `before` [B,D] of a row of length 0."""
    if lengths is None:
        return x[:, -1]
    index = (lengths - 1).clamp(min=0)[:, None, None].expand(-1, 1, x.shape[-1])
    return torch.where(lengths[:, None] > 0, x.gather(1, index)[:, 0], before)


def state_scan(
    *, r: Tensor, w: Tensor, k: Tensor, v: Tensor, removed: Tensor, rate: Tensor, initial: Tensor
) -> tuple[Tensor, Tensor]:
    """S <- diag(w) S - (rate removed) (removed^T S) + k v^T, y = S^T r, token by token.

    All [B,T,H,K] but v [B,T,H,V]; initial [B,H,K,V]. Returns y [B,T,H,V] and the last state. A token with w = 1 and
    removed = k = 0 leaves the state as it is. Rows of S belong to keys, so that neither product sums across lanes.
    """
    state, outputs = initial, []
    added = removed * rate
    for t in range(r.shape[1]):
        found = (state * removed[:, t, :, :, None]).sum(dim=-2, keepdim=True)  # [B,H,1,V]
        state = state * w[:, t, :, :, None] - added[:, t, :, :, None] * found
        state = state + k[:, t, :, :, None] * v[:, t, :, None, :]
        outputs.append((state * r[:, t, :, :, None]).sum(dim=-2))
    return torch.stack(outputs, dim=1), state


# `state_scan`, or another way to the same result
Scan = Callable[..., tuple[Tensor, Tensor]]


def time_mix(
    layer: TimeMix,
    x: Tensor,
    *,
    before: Tensor,
    matrix: Tensor,
    first_value: Tensor | None,
    valid: Tensor | None,
    head_norm_eps: float,
    scan: Scan = state_scan,
) -> tuple[Tensor, Tensor, Tensor]:
    """x [B,T,D], normalised; before [B,D]; matrix [B,H,K,V]; first_value [B,T,D]: of the first layer, None in it.

    `valid` [B,T] bool: padding does not move the matrix. Returns the output [B,T,D], the matrix after the tokens and
    the values [B,T,D] that the first layer hands to the others.
    """
    heads, size = layer.bonus.shape
    xr, xw, xk, xv, xa, xg = x + (shifted(x, before) - x) * layer.shift[:, None, None]
    r, k, v = F.linear(xr, layer.receptance), F.linear(xk, layer.key), F.linear(xv, layer.value)
    w = torch.exp(-MAX_DECAY * torch.sigmoid(_low_rank(layer.decay, xw, torch.tanh)))
    rate = torch.sigmoid(_low_rank(layer.rate, xa))
    gate = _low_rank(layer.gate, xg, torch.sigmoid)
    if first_value is None:
        first_value = v
    elif layer.value_mix is not None:
        v = v + (first_value - v) * torch.sigmoid(_low_rank(layer.value_mix, xv))
    removed = F.normalize(torch.unflatten(k * layer.removal_key, -1, (heads, size)), dim=-1)
    k = k * (1.0 + (rate - 1.0) * layer.key_rate)
    r, w, k, v, rate = (torch.unflatten(part, -1, (heads, size)) for part in (r, w, k, v, rate))
    written = k
    if valid is not None:
        is_token = valid[..., None, None]
        w = torch.where(is_token, w, 1.0)
        removed, written = removed * is_token, k * is_token
    y, matrix = scan(r=r, w=w, k=written, v=v, removed=removed, rate=rate, initial=matrix)
    y = F.layer_norm(y, (size,), eps=head_norm_eps).flatten(-2) * layer.head_norm.weight + layer.head_norm.bias
    y = y + ((r * k * layer.bonus).sum(dim=-1, keepdim=True) * v).flatten(-2)
    return F.linear(y * gate, layer.output), matrix, first_value


def channel_mix(layer: ChannelMix, x: Tensor, before: Tensor) -> Tensor:
    """x [B,T,D], normalised; before [B,D] -> [B,T,D]."""
    mixed = x + (shifted(x, before) - x) * layer.shift
    return F.linear(torch.relu(F.linear(mixed, layer.key)).square(), layer.value)


def _low_rank(network: LowRank, x: Tensor, activation: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    inner = F.linear(x, network.first)
    return F.linear(inner if activation is None else activation(inner), network.second, network.bias)
