"""Traces what a token reads back to the states, and to the earlier tokens that wrote them.

A layer reads a weighted sum of its states. A state of the linear gate is a sum over tokens of the values they wrote,
less the parts that later tokens replaced. With the read and write weights held fixed, the share of every earlier token
is exact: it is the derivative by the value that the token wrote. Exchanges between states are linear too. The gates of
gated layers are not: there the trace follows the routed amounts, as if the gates let all of them in.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from nsm_core.errors import InvalidRequest
from nsm_core.inspection.reading import Inspection, LayerActivity
from nsm_core.inspection.routing_capture import Kind


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayerTrace:
    """The origin of the content that one layer reads at a token. The shares of a head sum to 1.

    `heads` [H,t+1]: the share of each token up to it, and `before` [H] that of all before the text: the learned start,
    or the state that the text was read on top of. `states` [M]: the share of each state in the reads, mean over
    heads. `by_state` [M,t+1]: the shares of `heads` by the state that the token wrote to, mean over heads.
    """

    layer: str
    kind: Kind
    is_exact: bool
    heads: Tensor
    before: Tensor
    states: Tensor | None = None
    by_state: Tensor | None = None

    @property
    def tokens(self) -> Tensor:
        """[t+1]: the share of each token, mean over heads."""
        return self.heads.mean(dim=0)


def trace(inspection: Inspection, token: int) -> tuple[LayerTrace, ...]:
    """Traces each layer at the token with this index in the text.

    Memories are left out: each number of a row is erased by its own share, and a write belongs to a whole chunk. So are
    keyed slots: their weights have both signs, and are no shares.

    Raises InvalidRequest.
    """
    if not 0 <= token < len(inspection.ids):
        message = f"token must be in [0, {len(inspection.ids) - 1}], the text's tokens, got {token}"
        raise InvalidRequest(message, param="token")
    layers = (layer for layer in inspection.layers if layer.kind not in ("memory", "keyed"))
    return tuple(_trace_layer(layer, token, inspection.position) for layer in layers)


def _trace_layer(layer: LayerActivity, token: int, position: int) -> LayerTrace:
    if layer.kind == "attention":
        heads, before = _by_token(_required(layer.seen)[token], token)
        return LayerTrace(layer=layer.name, kind=layer.kind, is_exact=True, heads=heads, before=before)
    if layer.kind == "gated":
        return _trace_gated(layer, token, position)
    write = _required(layer.write)
    shares = torch.full_like(write[0], 1 / write.shape[-1]) if layer.read is None else layer.read[token]
    written, rest = _back(layer, shares, token)
    return LayerTrace(
        layer=layer.name,
        kind=layer.kind,
        is_exact=True,
        heads=written.sum(dim=1),
        before=rest,
        states=None if layer.read is None else shares.mean(dim=0),
        by_state=None if layer.read is None else written.mean(dim=0),
    )


def _back(layer: LayerActivity, shares: Tensor, token: int) -> tuple[Tensor, Tensor]:
    """shares [H,M] of the states that the token reads -> shares of the tokens [H,M,t+1], and the rest [H].

    The token's own write is included; later changes of the states are not.
    """
    write, trajectory = _required(layer.write), layer.trajectory
    written, rest = write.new_zeros(*shares.shape, token + 1), write.new_zeros(len(shares))
    for index in range(token, -1, -1):
        if index < token and trajectory is not None:
            fresh = trajectory.at_start[index]  # reset to the learned start, or never written
            rest += torch.where(fresh, shares, 0.0).sum(dim=-1)
            shares = torch.where(fresh, 0.0, shares)
        if index < token and index in layer.exchanges:
            shares = torch.einsum("hm,hmn->hn", shares, layer.exchanges[index])
        written[..., index] = shares * write[index]
        shares = shares * (1 - write[index])
    return written, rest + shares.sum(dim=-1)


def _trace_gated(layer: LayerActivity, token: int, position: int) -> LayerTrace:
    """Tokens in view are read directly, states as of the last boundary. So the trace goes back chunk by chunk."""
    chunk, read = layer.chunk, _required(layer.read)
    if chunk is None:
        raise ValueError(f"layer {layer.name} has no boundaries")
    heads, before = _by_token(_required(layer.seen)[token], token)
    routed = -torch.log1p(-_required(layer.write).clamp(max=1 - 1e-7))
    by_state = read.new_zeros(*read.shape[1:], token + 1)
    shares = read[token]
    end = (position + token) // chunk * chunk - position  # of the last complete chunk, in tokens of the text
    while end > 0:
        start = max(0, end - chunk)
        own = routed[start:end]
        total = own.sum(dim=0)
        if start == 0 and layer.carried is not None:
            total = total + layer.carried
        taken = shares * -torch.expm1(-total)
        by_state[..., start:end] = (taken * own / total.clamp(min=1e-12)).permute(1, 2, 0)
        before = before + (taken - by_state[..., start:end].sum(dim=-1)).sum(dim=-1)
        shares, end = shares - taken, end - chunk
    return LayerTrace(
        layer=layer.name,
        kind=layer.kind,
        is_exact=False,
        heads=heads + by_state.sum(dim=1),
        before=before + shares.sum(dim=-1),
        states=read[token].mean(dim=0),
        by_state=by_state.mean(dim=0),
    )


def _by_token(seen: Tensor, token: int) -> tuple[Tensor, Tensor]:
    """seen [H,W] by age -> the same by token [H,t+1], and the sum of those before the text [H]."""
    num_seen = min(seen.shape[1], token + 1)
    heads = seen.new_zeros(len(seen), token + 1)
    heads[:, token + 1 - num_seen :] = seen[:, :num_seen].flip(1)
    return heads, seen[:, num_seen:].sum(dim=-1)


def _required(part: Tensor | None) -> Tensor:
    if part is None:
        raise ValueError("the layer's kind has no such weights")
    return part
