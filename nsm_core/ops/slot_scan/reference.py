"""The slot recurrence, token by token: the specification of every faster form.

Equations (3)-(5) of the PULSE linear gate (docs/model.md): convex writes into a bank of keys and a bank of values that
share one write weight per slot and token, then a softmax read over the slots.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor


def slot_scan_reference(
    *,
    v: Tensor,
    log_decay: Tensor,
    scale: Tensor,
    state: Tensor,
    q: Tensor | None = None,
    k: Tensor | None = None,
    reset: Tensor | None = None,
    initial: Tensor | None = None,
    read_bias: Tensor | None = None,
    active: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    chunk_len: int = 64,
) -> tuple[Tensor, Tensor]:
    """q, k, v [B,T,H,K]; log_decay [B,T,H,M] <= 0; scale [H]; state [B,H,M,2K] (keys beside values).

    A slot keeps exp(log_decay) of itself and takes the rest, 1 - exp(log_decay), from the token.

    `reset` [B, T/chunk_len] bool: before the first token of such a chunk the state becomes `initial` [H,M,2K].
    `read_bias` [B,T,H,M] is added to the scaled read logits. Without `q` and `k` it is the read logits, and the state
    is the bank of values alone, [B,H,M,K]; so is `initial`. `active` [H,M] or [B,H,M] bool: other slots are neither
    written nor read; one at least must be active. `cu_seqlens` int [S+1]: the one row (B=1) holds S sequences end to
    end, token cu_seqlens[s] is the first of sequence s, and state is [S,H,M,2K].
    Returns out [B,T,H,K] and the state after the last token (of each sequence), both in the state's dtype.
    """
    if active is not None:
        active = active.expand(state.shape[:3])
    tokens = {"q": q, "k": k, "v": v, "log_decay": log_decay, "read_bias": read_bias}
    if cu_seqlens is None:
        return _scan_rows(tokens, scale, state, reset, initial, active, chunk_len)
    outputs, states = [], []
    for s, (first, end) in enumerate(pairwise(cu_seqlens.tolist())):
        own = {name: None if x is None else x[:, first:end] for name, x in tokens.items()}
        own_active = None if active is None else active[s : s + 1]
        out, last = _scan_rows(own, scale, state[s : s + 1], None, None, own_active, chunk_len)
        outputs.append(out)
        states.append(last)
    return torch.cat(outputs, dim=1), torch.cat(states)


def _scan_rows(
    tokens: dict[str, Tensor | None],
    scale: Tensor,
    state: Tensor,
    reset: Tensor | None,
    initial: Tensor | None,
    active: Tensor | None,
    chunk_len: int,
) -> tuple[Tensor, Tensor]:
    log_decay = tokens["log_decay"]
    outputs = []
    for t in range(0 if log_decay is None else log_decay.shape[1]):
        if reset is not None and initial is not None and t % chunk_len == 0:
            state = torch.where(reset[:, t // chunk_len, None, None, None], initial, state)
        token = {name: x[:, t].to(state.dtype) for name, x in tokens.items() if x is not None}
        out, state = _scan_token(token, scale, state, active)
        outputs.append(out)
    if not outputs:
        v = tokens["v"]
        return state.new_empty(() if v is None else v.shape), state
    return torch.stack(outputs, dim=1), state


def _scan_token(token: dict[str, Tensor], scale: Tensor, state: Tensor, active: Tensor | None) -> tuple[Tensor, Tensor]:
    decay = token["log_decay"]
    if active is not None:
        decay = torch.where(active, decay, 0.0)
    pair = torch.cat((token["k"], token["v"]), dim=-1) if "k" in token else token["v"]
    state = decay.exp()[..., None] * state - torch.expm1(decay)[..., None] * pair[:, :, None, :]
    *keys, values = torch.split(state, token["v"].shape[-1], dim=-1)
    logits = token["read_bias"] if "read_bias" in token else torch.zeros_like(decay)
    if "q" in token:
        logits = logits + scale[None, :, None] * torch.einsum("bhk,bhmk->bhm", token["q"], keys[0])
    if active is not None:
        logits = logits.masked_fill(~active, -torch.inf)
    return torch.einsum("bhm,bhmk->bhk", torch.softmax(logits, dim=-1), values), state
