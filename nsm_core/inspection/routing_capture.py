"""Captures how one layer routes one token, from the outputs of the layer's parts and the state before the token."""

from __future__ import annotations

import dataclasses
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from nsm_core.inspection.layer_hooks import HookedLayer
from nsm_core.model.attention import WindowAttention
from nsm_core.model.gated import GatedMixer
from nsm_core.model.keyed import KeyedMixer
from nsm_core.model.memory import MemoryMixer, cosine
from nsm_core.model.pulse import PulseMixer
from nsm_core.model.recurrence import LinearRecurrence
from nsm_core.state.spec import State

Kind = Literal["slots", "keyed", "gated", "memory", "attention", "recurrence"]
# Kind -> the tensor with its states, [H, M, width]. All heads share the rows [R, width] of a memory.
STATES: dict[Kind, str] = {"slots": "slots", "keyed": "slots", "gated": "gated", "memory": "memory"}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Capture:
    """One token of each row in one layer, fp32. A weight that the kind of layer lacks is None.

    `write` [B,H,M]: the share of each state that the token replaces; in a gated layer the share that its sum may
    replace at the next boundary, in a linear recurrence of each channel [B,1,d]. `read` [B,H,M]: the weights of the
    states in the reads after it. `seen` [B,H,W]: the weights of tokens in view, the token itself first, then the
    one before it. The whole read is `read` and `seen` together: their sum is 1.

    Keyed slots have routes of both signs and unit length. `write` is the share of a slot's own content that the token
    removes, `read` the squared route: its sum is 1 too, but it is not the weight of a sum.

    The states of a memory are its rows, the same for every head: `write` is how far the row was addressed, which a
    token does that completes a chunk and no other, `usage` [B,M] in [0, 1] how fully and lately it was, after it.
    """

    kind: Kind
    write: Tensor | None = None
    read: Tensor | None = None
    seen: Tensor | None = None
    usage: Tensor | None = None


def has_states(layer: HookedLayer) -> bool:
    """Whether the layer routes tokens to states."""
    return isinstance(layer.mixer, PulseMixer | KeyedMixer | GatedMixer | MemoryMixer)


def capture(layer: HookedLayer, before: State, positions: Tensor) -> Capture | None:
    """Captures the token at `positions` [B] that `model.step` has just read on top of the layer's state `before`.

    Returns None for a kind of layer that this module does not know.
    """
    mixer = layer.mixer
    if isinstance(mixer, PulseMixer):
        return _capture_slots(mixer, layer, before)
    if isinstance(mixer, KeyedMixer):
        return _capture_keyed(mixer, layer, before, positions)
    if isinstance(mixer, GatedMixer):
        return _capture_gated(mixer, layer, before, positions)
    if isinstance(mixer, MemoryMixer):
        return _capture_memory(mixer, layer, before, positions)
    if isinstance(mixer, WindowAttention):
        return _capture_attention(mixer, layer, before, positions)
    if isinstance(mixer, LinearRecurrence):
        opening = layer.outputs["project"].chunk(3, dim=-1)[1].float()
        return Capture(kind="recurrence", write=torch.sigmoid(opening + mixer.open_bias).view(len(positions), 1, -1))
    return None


def _tokens(layer: HookedLayer) -> dict[str, Tensor]:
    """The outputs of the convolution [B,H,K] fp32: v, and k and q if the layer has them."""
    *parts, _ = layer.outputs["conv"]
    return {name: part.float().flatten(0, 1) for name, part in zip(("v", "k", "q"), reversed(parts), strict=False)}


def _write(layer: HookedLayer, states: Tensor) -> Tensor:
    """Write weights [B,H,M] of states [B,H,M,...]. Tokens never write to the last ones, those of an upper level."""
    batch, heads, num_states = states.shape[:3]
    log_decay = layer.outputs["router"].float().reshape(batch, heads, -1)
    return -torch.expm1(F.pad(log_decay, (0, num_states - log_decay.shape[-1])))


def _capture_slots(mixer: PulseMixer, layer: HookedLayer, before: State) -> Capture:
    slots, token = before["slots"], _tokens(layer)
    write = _write(layer, slots)
    logits = torch.zeros_like(write)
    if "read_bias" in layer.outputs:
        logits = logits + layer.outputs["read_bias"].float().reshape(write.shape)
    if "q" in token:
        keys = torch.lerp(slots[..., : mixer.head_dim], token["k"][:, :, None], write[..., None])
        logits = logits + mixer.scale.float()[:, None] * (keys @ token["q"][..., None]).squeeze(-1)
    if layer.active is not None:
        logits = logits.masked_fill(~layer.active.expand_as(logits), -torch.inf)
    return Capture(kind="slots", write=write, read=logits.softmax(dim=-1))


def _capture_keyed(mixer: KeyedMixer, layer: HookedLayer, before: State, positions: Tensor) -> Capture:
    x = layer.inputs["project"].view(len(positions), 1, -1)
    write, read = mixer.shares(x, before["conv_tail"], positions)
    return Capture(kind="keyed", write=write, read=read)


def _capture_gated(mixer: GatedMixer, layer: HookedLayer, before: State, positions: Tensor) -> Capture:
    """States are read as they were at the last boundary, tokens from the ring with this one in its place."""
    slots, width, chunk = before["gated"], mixer.head_dim, mixer.chunk
    token = _tokens(layer)
    q = token["q"] * mixer.scale.float()[:, None]
    normed = F.rms_norm(slots, (width,), eps=mixer.eps)
    keys = F.rms_norm(normed @ mixer.slot_keys.float(), (width,), eps=mixer.eps)
    on_slots = (keys @ q[..., None]).squeeze(-1)
    ages = torch.arange(chunk, device=positions.device)
    row = (positions[:, None] - ages) % chunk
    ring = torch.take_along_dim(before["recent"][..., :width], row[..., None, None], dim=1)  # [B,C,H,K], by age
    ring = torch.cat((token["k"][:, None], ring[:, 1:]), dim=1)
    on_tokens = torch.einsum("bhk,bchk->bhc", q, ring)
    on_tokens = on_tokens.masked_fill((ages > positions[:, None])[:, None], -torch.inf)
    weights = torch.cat((on_tokens, on_slots), dim=-1).softmax(dim=-1)
    return Capture(kind="gated", write=_write(layer, slots), read=weights[..., chunk:], seen=weights[..., :chunk])


def _capture_memory(mixer: MemoryMixer, layer: HookedLayer, before: State, positions: Tensor) -> Capture:
    """Rows are read as they were at the last boundary, and addressed by all write heads in turn at the next.

    Usage tells how far: 1 - usage is multiplied by 1 - address of each head, and usage decays after that.
    """
    queries = layer.outputs["project"].float().flatten(1)[:, : mixer.heads * mixer.width]
    alike = cosine(queries.unflatten(-1, (mixer.heads, mixer.width)), before["memory"].float())
    read = (mixer.log_strength.float().exp()[:, None] * alike).softmax(dim=-1)
    is_boundary = ((positions + 1) % mixer.chunk == 0)[:, None]
    usage = torch.where(is_boundary, layer.outputs["write"].usage, before["usage"]).float()
    free = (1 - usage / mixer.write.decay) / (1 - before["usage"].float())
    write = torch.where(is_boundary, 1 - free, 0.0).clamp(0, 1)
    return Capture(kind="memory", write=write[:, None].expand_as(read), read=read, usage=usage)


def _capture_attention(mixer: WindowAttention, layer: HookedLayer, before: State, positions: Tensor) -> Capture:
    x = layer.inputs["project"].view(len(positions), 1, -1)
    q, new = mixer.queries_and_memory(x, positions[:, None])
    ages = torch.arange(mixer.window + 1, device=positions.device)
    row = (positions[:, None] - ages[1:]) % mixer.window
    ring = torch.take_along_dim(before["kv"][:, :, 0].float(), row[:, None, :, None], dim=2)  # [B,Hkv,W,K], by age
    keys = torch.cat((new[:, :, 0].float(), ring), dim=2).repeat_interleave(mixer.heads // mixer.kv_heads, dim=1)
    scores = (keys @ q[:, 0].float()[..., None]).squeeze(-1)
    seen = scores.masked_fill((ages > positions[:, None])[:, None], -torch.inf).softmax(dim=-1)
    return Capture(kind="attention", seen=seen)
