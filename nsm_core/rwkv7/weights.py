"""An RWKV-7 model's tensors in fp32, checked against the shapes that its config asks for."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from torch import Tensor

from nsm_core.errors import CheckpointError
from nsm_core.formats.int4_groups import PackedInt4
from nsm_core.formats.int8_rows import Int8Rows
from nsm_core.formats.number_kinds import is_finite
from nsm_core.rwkv7.config import Rwkv7Config
from nsm_core.rwkv7.reading import ModelTensors
from nsm_core.rwkv7.tensors import Shape, tensor_shapes


class CheckedTensors:
    """The tensors of a model by canonical name, in fp32 and without leading dimensions of size 1.

    Reads a tensor each time it is asked for. Raises CheckpointError that names file and tensor: one that is not
    there, has another shape, or holds a number that is not finite.
    """

    def __init__(self, config: Rwkv7Config, tensors: Mapping[str, Tensor]) -> None:
        self._shapes: Mapping[str, Shape] = tensor_shapes(config)
        self._tensors = tensors
        self._origin = f"{tensors.path}: " if isinstance(tensors, ModelTensors) else ""

    def stored(self, name: str) -> Tensor:
        """The tensor in the dtype that the file has, on the CPU."""
        shape = self._shapes[name]
        try:
            found = self._tensors[name]
        except KeyError:
            raise self.refusal(name, "is missing") from None
        if _without_ones(tuple(found.shape)) != _without_ones(shape):
            raise self.refusal(name, f"has the shape {list(found.shape)}, not {list(shape)}")
        if not found.is_floating_point():
            raise self.refusal(name, f"holds {found.dtype}, not floating point numbers")
        self._require_finite(name, found)
        return found.detach().reshape(shape[2:] if shape[:2] == (1, 1) else shape)

    def packed(self, name: str) -> PackedInt4 | None:
        """The matrix as an int4 file has it; None if the tensors are no such file's."""
        packed = self._tensors.packed(name) if isinstance(self._tensors, ModelTensors) else None
        if packed is not None:
            self._require_finite(name, packed.scale)
        return packed

    def rows(self, name: str) -> Int8Rows | None:
        """The matrix as an int8 file has it; None if the tensors are no such file's."""
        rows = self._tensors.rows(name) if isinstance(self._tensors, ModelTensors) else None
        if rows is not None:
            self._require_finite(name, rows.scale)
        return rows

    def _require_finite(self, name: str, values: Tensor) -> None:
        if not is_finite(values):
            raise self.refusal(name, "holds a number that is not finite")

    def refusal(self, name: str, fault: str) -> CheckpointError:
        """The error for a tensor that cannot be used."""
        return CheckpointError(f"{self._origin}the tensor {name} {fault}")

    def __getitem__(self, name: str) -> Tensor:
        return self.stored(name).float().contiguous()


def _without_ones(shape: Shape) -> Shape:
    """Vectors are stored as [D] and as [1, 1, D]."""
    return tuple(size for size in shape if size != 1)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Norm:
    """A LayerNorm: gain and offset [D]."""

    weight: Tensor
    bias: Tensor


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LowRank:
    """A small network: `first` [rank, D], `second` [D, rank], and `bias` [D] (0 where there is none)."""

    first: Tensor
    second: Tensor
    bias: Tensor


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TimeMix:
    """`shift` [6, D]: how much of the token before goes into r, w, k, v, a and g. Matrices [D, D]; vectors [D]."""

    shift: Tensor
    decay: LowRank
    rate: LowRank
    value_mix: LowRank | None  # None in the first layer, whose values the others mix into theirs
    gate: LowRank
    removal_key: Tensor
    key_rate: Tensor
    bonus: Tensor  # [H, K]
    receptance: Tensor
    key: Tensor
    value: Tensor
    output: Tensor
    head_norm: Norm


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ChannelMix:
    """`shift` [D]; `key` [hidden, D], `value` [D, hidden]."""

    shift: Tensor
    key: Tensor
    value: Tensor


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    time_norm: Norm
    time_mix: TimeMix
    channel_norm: Norm
    channel_mix: ChannelMix


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """All of a model: `embedding` and `head` [V, D]."""

    embedding: Tensor
    first_norm: Norm
    layers: tuple[Layer, ...]
    last_norm: Norm
    head: Tensor


def load_weights(config: Rwkv7Config, tensors: Mapping[str, Tensor], device: torch.device) -> Weights:
    """Reads everything, in fp32. Raises CheckpointError that names the tensor."""
    return _Loader(CheckedTensors(config, tensors), device).load(config)


class _Loader:
    def __init__(self, tensors: CheckedTensors, device: torch.device) -> None:
        self._tensors, self._device = tensors, device

    def load(self, config: Rwkv7Config) -> Weights:
        return Weights(
            embedding=self._get("emb.weight"),
            first_norm=self._norm("blocks.0.ln0"),
            layers=tuple(self._layer(index) for index in range(config.num_layers)),
            last_norm=self._norm("ln_out"),
            head=self._get("head.weight"),
        )

    def _get(self, name: str) -> Tensor:
        value = self._tensors[name].to(self._device)
        # What lies in a mapped file may be overwritten: weights are the model's own
        return value.clone() if value.device.type == "cpu" else value

    def _norm(self, name: str) -> Norm:
        return Norm(weight=self._get(f"{name}.weight"), bias=self._get(f"{name}.bias"))

    def _low_rank(self, prefix: str, letter: str, *, has_bias: bool = True) -> LowRank:
        second = self._get(f"{prefix}{letter}2").T.contiguous()
        bias = self._get(f"{prefix}{letter}0") if has_bias else second.new_zeros(len(second))
        return LowRank(first=self._get(f"{prefix}{letter}1").T.contiguous(), second=second, bias=bias)

    def _layer(self, index: int) -> Layer:
        prefix = f"blocks.{index}."
        return Layer(
            time_norm=self._norm(f"{prefix}ln1"),
            time_mix=self._time_mix(f"{prefix}att.", is_first=index == 0),
            channel_norm=self._norm(f"{prefix}ln2"),
            channel_mix=ChannelMix(
                shift=self._get(f"{prefix}ffn.x_k"),
                key=self._get(f"{prefix}ffn.key.weight"),
                value=self._get(f"{prefix}ffn.value.weight"),
            ),
        )

    def _time_mix(self, prefix: str, *, is_first: bool) -> TimeMix:
        return TimeMix(
            shift=torch.stack([self._get(f"{prefix}x_{letter}") for letter in "rwkvag"]),
            decay=self._low_rank(prefix, "w"),
            rate=self._low_rank(prefix, "a"),
            value_mix=None if is_first else self._low_rank(prefix, "v"),
            gate=self._low_rank(prefix, "g", has_bias=False),
            removal_key=self._get(f"{prefix}k_k"),
            key_rate=self._get(f"{prefix}k_a"),
            bonus=self._get(f"{prefix}r_k"),
            receptance=self._get(f"{prefix}receptance.weight"),
            key=self._get(f"{prefix}key.weight"),
            value=self._get(f"{prefix}value.weight"),
            output=self._get(f"{prefix}output.weight"),
            head_norm=self._norm(f"{prefix}ln_x"),
        )
