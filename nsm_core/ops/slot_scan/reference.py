"""The slot recurrence, token by token: the specification of every faster implementation.

Equations (3)-(5) of the PULSE linear gate (docs/model.md): convex writes into a bank of keys and a bank of values that
share one write weight per slot and token, then a softmax read over the slots.
"""

from __future__ import annotations

import dataclasses
from itertools import pairwise

import torch
from torch import Tensor

from nsm_core.ops.slot_scan.inputs import ScanInputs


def slot_scan_reference(inputs: ScanInputs, *, chunk_len: int = 64) -> tuple[Tensor, Tensor]:
    """Returns out [B,T,H,K] and the state after the last token (of each sequence), both in the state's dtype.

    `chunk_len`: the tokens for each entry of `inputs.reset`.
    """
    if inputs.active is not None:
        inputs = dataclasses.replace(inputs, active=inputs.active.expand(inputs.state.shape[:3]))
    if inputs.cu_seqlens is None:
        return _scan_rows(inputs, chunk_len)
    outputs, states = [], []
    for s, (first, end) in enumerate(pairwise(inputs.cu_seqlens.tolist())):
        tokens = {name: x[:, first:end] for name, x in inputs.tokens.items()}
        active = None if inputs.active is None else inputs.active[s : s + 1]
        own = dataclasses.replace(
            inputs, **tokens, state=inputs.state[s : s + 1], active=active, reset=None, initial=None, cu_seqlens=None
        )
        out, last = _scan_rows(own, chunk_len)
        outputs.append(out)
        states.append(last)
    return torch.cat(outputs, dim=1), torch.cat(states)


def _scan_rows(inputs: ScanInputs, chunk_len: int) -> tuple[Tensor, Tensor]:
    state, reset, initial = inputs.state, inputs.reset, inputs.initial
    outputs = []
    for t in range(inputs.log_decay.shape[1]):
        if reset is not None and initial is not None and t % chunk_len == 0:
            state = torch.where(reset[:, t // chunk_len, None, None, None], initial, state)
        token = {name: x[:, t].to(state.dtype) for name, x in inputs.tokens.items()}
        out, state = _scan_token(token, inputs.scale, state, inputs.active)
        outputs.append(out)
    if not outputs:
        return state.new_empty(inputs.v.shape), state
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
