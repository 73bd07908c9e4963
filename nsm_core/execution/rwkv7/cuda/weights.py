"""An RWKV-7 model's weights in the layout of its kernels for GPUs, packed from the file layer by layer."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from nsm_core.execution.rwkv7.cuda.kernels.heads import Columns, HeadWeights
from nsm_core.execution.rwkv7.cuda.kernels.products import Activation, Part, Products, pack_products, padded
from nsm_core.execution.rwkv7.cuda.kernels.tokens import Gains
from nsm_core.rwkv7.config import Rwkv7Config
from nsm_core.rwkv7.model import Rwkv7Model
from nsm_core.rwkv7.weights import CheckedTensors

# The order in which a token's mixtures lie in memory, and the letters of their shares in official names
MIXTURES = "rwkvag"


@dataclasses.dataclass(frozen=True, slots=True)
class LayerWeights:
    """`project`: receptance, key, value, and the inner vectors of the small networks; `outer`: what these make."""

    time_norm: Gains
    time_shares: Tensor
    project: Products
    outer: Products
    heads: HeadWeights
    columns: Columns
    output: Products
    channel_norm: Gains
    channel_share: Tensor
    channel_key: Products
    channel_value: Products

    @property
    def products(self) -> tuple[Products, ...]:
        return (self.project, self.outer, self.output, self.channel_key, self.channel_value)


@dataclasses.dataclass(frozen=True, slots=True)
class CudaRwkv7Weights:
    """embedding [V, D] as the file has it: rows of it are read, never multiplied. `head` has `num_ids` rows."""

    embedding: Tensor
    first_norm: Gains
    layers: tuple[LayerWeights, ...]
    last_norm: Gains
    head: Products

    @property
    def num_bytes(self) -> int:
        """Bytes that a step reads of matrices."""
        return self.head.num_bytes + sum(each.num_bytes for layer in self.layers for each in layer.products)


def pack_cuda_rwkv7(model: Rwkv7Model, dtype: torch.dtype) -> CudaRwkv7Weights:
    """Matrices in `dtype`, norms and vectors in fp32, on the model's device. Raises CheckpointError that names the
    tensor.
    """
    return _Packer(model, dtype).pack()


class _Packer:
    def __init__(self, model: Rwkv7Model, dtype: torch.dtype) -> None:
        self._config: Rwkv7Config = model.config
        self._num_ids, self._device, self._dtype = model.num_ids, model.device, dtype
        self._tensors = CheckedTensors(model.config, model.tensors)

    def pack(self) -> CudaRwkv7Weights:
        embedding = self._tensors.stored("emb.weight").to(self._device)
        return CudaRwkv7Weights(
            # A copy: what lies in a mapped file may be overwritten
            embedding=embedding.clone() if embedding.device.type == "cpu" else embedding,
            first_norm=self._norm("blocks.0.ln0"),
            layers=tuple(self._layer(index) for index in range(self._config.num_layers)),
            last_norm=self._norm("ln_out"),
            head=self._products(Part(weight=self._matrix("head.weight")[: self._num_ids])),
        )

    def _matrix(self, name: str) -> Tensor:
        return self._tensors.stored(name)

    def _vector(self, name: str) -> Tensor:
        return self._tensors[name].flatten().to(self._device).clone()

    def _norm(self, name: str) -> Gains:
        return Gains(self._vector(f"{name}.weight"), self._vector(f"{name}.bias"), self._config.norm_eps)

    def _products(self, *parts: Part) -> Products:
        return pack_products(parts, self._dtype, self._device)

    def _layer(self, index: int) -> LayerWeights:
        prefix, att = f"blocks.{index}.", f"blocks.{index}.att."
        letters = "wavg" if index > 0 else "wag"
        project = self._project(att, letters)
        outer = self._outer(att, letters, project)
        columns = dict(zip(letters, outer.starts, strict=True))
        return LayerWeights(
            time_norm=self._norm(f"{prefix}ln1"),
            time_shares=torch.stack([self._vector(f"{att}x_{letter}") for letter in MIXTURES]),
            project=project,
            outer=outer,
            heads=HeadWeights(
                removal_key=self._vector(f"{att}k_k"),
                key_rate=self._vector(f"{att}k_a"),
                bonus=self._vector(f"{att}r_k"),
                gain=self._vector(f"{att}ln_x.weight"),
                bias=self._vector(f"{att}ln_x.bias"),
                eps=self._config.head_norm_eps,
            ),
            columns=Columns(
                received=project.starts[0],
                key=project.starts[1],
                value=project.starts[2],
                decay=columns["w"],
                rate=columns["a"],
                gate=columns["g"],
                residual=columns.get("v"),
            ),
            output=self._products(Part(weight=self._matrix(f"{att}output.weight"))),
            channel_norm=self._norm(f"{prefix}ln2"),
            channel_share=self._vector(f"{prefix}ffn.x_k")[None],
            channel_key=self._products(
                Part(weight=self._matrix(f"{prefix}ffn.key.weight"), activation=Activation.SQUARED_RELU, is_inner=True)
            ),
            channel_value=self._products(Part(weight=self._matrix(f"{prefix}ffn.value.weight"))),
        )

    def _project(self, att: str, letters: str) -> Products:
        width = self._config.width

        def part(name: str, letter: str) -> Part:
            return Part(weight=self._matrix(att + name), input_at=MIXTURES.index(letter) * width)

        large = [part("receptance.weight", "r"), part("key.weight", "k"), part("value.weight", "v")]
        activations = {"w": Activation.TANH, "g": Activation.SIGMOID}
        small = [
            Part(
                weight=self._matrix(f"{att}{letter}1").T,
                input_at=MIXTURES.index(letter) * width,
                activation=activations.get(letter, Activation.NONE),
                is_inner=True,
            )
            for letter in letters
        ]
        return self._products(*large, *small)

    def _outer(self, att: str, letters: str, project: Products) -> Products:
        """The second matrices of the small networks, on the outputs of the first ones."""
        parts = []
        for letter, start in zip(letters, project.starts[3:], strict=True):
            weight = self._matrix(f"{att}{letter}2").T
            # What lies behind an inner vector is zero, and stays so: its width may be that of a whole step
            widened = torch.nn.functional.pad(weight, (0, padded(weight.shape[1]) - weight.shape[1]))
            bias = self._tensors[f"{att}{letter}0"].flatten() if letter != "g" else None
            parts.append(Part(weight=widened, input_at=start, bias=bias))
        return self._products(*parts)
