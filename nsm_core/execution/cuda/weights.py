"""A model's weights in the layout of the decode kernels."""

from __future__ import annotations

import dataclasses
import math

import torch
import torch.nn.functional as F
from torch import Tensor

from nsm_core.execution.cuda.kernels.keyed import KeyedWeights
from nsm_core.execution.cuda.kernels.linear import Linear, padded, split
from nsm_core.execution.cuda.kernels.slots import SlotWeights
from nsm_core.model.attention import WindowAttention
from nsm_core.model.block import Block
from nsm_core.model.keyed import KeyedMixer
from nsm_core.model.nsm import NsmModel
from nsm_core.model.pulse import PulseMixer
from nsm_core.model.router import SoftmaxRouter


@dataclasses.dataclass(frozen=True, slots=True)
class SlotLayer:
    """`project` makes q, k, v and the gate; `router` logits (and write strengths), in fp32."""

    project: Linear
    router: Linear
    slots: SlotWeights


@dataclasses.dataclass(frozen=True, slots=True)
class KeyedLayer:
    """`project` makes routes, values and the gate; `router` strengths and decays, in fp32."""

    project: Linear
    router: Linear
    slots: KeyedWeights


@dataclasses.dataclass(frozen=True, slots=True)
class AttentionLayer:
    """`project` makes q, k, v; scale [H] fp32 multiplies the scores."""

    project: Linear
    scale: Tensor
    window: int


@dataclasses.dataclass(frozen=True, slots=True)
class LayerWeights:
    """A block: its mixer, and the parts that every block has."""

    mixer: SlotLayer | KeyedLayer | AttentionLayer
    out: Linear
    up: Linear
    down: Linear


@dataclasses.dataclass(frozen=True, slots=True)
class DecodeWeights:
    """embedding [V,d] fp32 is that of the inputs; `output` gives the logits of hidden vectors."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    final_gain: Tensor
    output: Linear

    def rings(self, dtype: torch.dtype) -> dict[str, torch.dtype]:
        """The states that are rings, by name, to be held as `dtype`."""
        mixers = enumerate(layer.mixer for layer in self.layers)
        return {f"layers.{index}.kv": dtype for index, mixer in mixers if isinstance(mixer, AttentionLayer)}

    @property
    def num_bytes(self) -> int:
        """Bytes that a step reads of matrices."""
        total = self.output.num_bytes
        for layer in self.layers:
            linears = [layer.mixer.project, layer.out, layer.up, layer.down]
            linears += [] if isinstance(layer.mixer, AttentionLayer) else [layer.mixer.router]
            total += sum(linear.num_bytes for linear in linears)
        return total


def pack_matrix(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """[N, width] -> [N, padded width], zeros beyond the width."""
    return F.pad(weight, (0, padded(weight.shape[1]) - weight.shape[1])).to(dtype).contiguous()


def _plain(weight: Tensor, dtype: torch.dtype) -> Linear:
    return Linear(pack_matrix(weight, dtype), weight.shape[1])


def _after_norm(
    norm: torch.nn.RMSNorm, weight: Tensor, dtype: torch.dtype, *, bias: Tensor | None = None, is_gated: bool = False
) -> Linear:
    """The layer on normalised inputs: the norm's gain goes into the weight, in fp32."""
    packed = pack_matrix(weight.float() * norm.weight.float(), dtype)
    eps = 0.0 if norm.eps is None else norm.eps
    return Linear(packed, weight.shape[1], is_normed=True, is_gated=is_gated, bias=bias, eps=eps)


def _split(linear: Linear) -> Linear:
    return dataclasses.replace(linear, weight=split(linear.weight), is_split=True)


def _slot_layer(block: Block, mixer: PulseMixer, dtype: torch.dtype) -> SlotLayer:
    router = mixer.router
    weight: Tensor = router.logits.weight
    bias: Tensor = router.logits.bias
    selection_bias = timescale = None
    if isinstance(router, SoftmaxRouter):
        weight, bias = torch.cat((weight, router.strength.weight)), torch.cat((bias, router.strength.bias))
        selection_bias, timescale = router.selection_bias.float(), router.log_timescale.float()
    return SlotLayer(
        project=_after_norm(block.mixer_norm, mixer.project.weight, dtype),
        router=_split(_after_norm(block.mixer_norm, weight, torch.float32, bias=bias.float())),
        slots=SlotWeights(
            conv=mixer.conv.weight.float().contiguous(),
            scale=mixer.scale.float(),
            gain=mixer.out_norm.float(),
            bias=selection_bias,
            timescale=timescale,
            top_k=router.top_k if isinstance(router, SoftmaxRouter) else 0,
            taper=router.taper if isinstance(router, SoftmaxRouter) else 1.0,
            eps=mixer.eps,
        ),
    )


def _keyed_layer(block: Block, mixer: KeyedMixer, dtype: torch.dtype) -> KeyedLayer:
    rates = _after_norm(block.mixer_norm, mixer.rates.weight, torch.float32, bias=mixer.rates.bias.float())
    return KeyedLayer(
        project=_after_norm(block.mixer_norm, mixer.project.weight, dtype),
        router=_split(rates),
        slots=KeyedWeights(
            read_taps=mixer.conv.read.float().contiguous(),
            write_taps=mixer.conv.write.float().contiguous(),
            value_taps=mixer.conv.value.float().contiguous(),
            gain=mixer.out_norm.float(),
            skip=mixer.skip.float(),
            eps=mixer.eps,
        ),
    )


def _attention_layer(block: Block, mixer: WindowAttention, dtype: torch.dtype) -> AttentionLayer:
    scale = mixer.log_scale.float().exp() / math.sqrt(mixer.head_dim)
    return AttentionLayer(_after_norm(block.mixer_norm, mixer.project.weight, dtype), scale, mixer.window)


def _layer(block: Block, dtype: torch.dtype) -> LayerWeights:
    mixer = block.mixer
    if isinstance(mixer, PulseMixer):
        packed: SlotLayer | KeyedLayer | AttentionLayer = _slot_layer(block, mixer, dtype)
        out = mixer.out.weight
    elif isinstance(mixer, KeyedMixer):
        packed, out = _keyed_layer(block, mixer, dtype), mixer.out.weight
    elif isinstance(mixer, WindowAttention):
        packed, out = _attention_layer(block, mixer, dtype), mixer.out.weight
    else:
        raise TypeError(f"no decode kernels for layers of the kind {type(mixer).__name__}")
    return LayerWeights(
        mixer=packed,
        out=_plain(out, dtype),
        up=_after_norm(block.mlp_norm, block.mlp.up.weight, dtype, is_gated=True),
        down=_plain(block.mlp.down.weight, dtype),
    )


@torch.no_grad()
def pack_weights(model: NsmModel, dtype: torch.dtype) -> DecodeWeights:
    """Large matrices in `dtype`; router, convolution, norms and scales in fp32. TypeError for other kinds of layers."""
    embedding = model.embedding.weight.detach()
    return DecodeWeights(
        embedding=embedding.float(),
        layers=tuple(_layer(block, dtype) for block in model.layers),
        final_gain=model.final_norm.weight.detach().float(),
        output=_plain(embedding, dtype),
    )
