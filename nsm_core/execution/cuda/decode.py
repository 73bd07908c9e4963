"""One token for each row of a batch: the launches of a step, over buffers that keep their addresses."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from nsm_core.config import ModelConfig
from nsm_core.execution.cuda.kernels.attention import attend_in_place, num_pieces
from nsm_core.execution.cuda.kernels.chain import may_chain
from nsm_core.execution.cuda.kernels.keyed import keyed_step_in_place
from nsm_core.execution.cuda.kernels.linear import ROWS, Linear, Stream, make_stream, padded, run_linear
from nsm_core.execution.cuda.kernels.rows import begin_step, final_norm
from nsm_core.execution.cuda.kernels.slots import slot_step_in_place
from nsm_core.execution.cuda.weights import AttentionLayer, DecodeWeights, KeyedLayer, SlotLayer
from nsm_core.state.spec import POSITION, State

NO_ROW = -1  # where a batch is padded


@dataclasses.dataclass(frozen=True, slots=True)
class Buffers:
    """What a step reads and writes besides weights and states, [B, ...] each.

    rows and ids int64 are its input, hidden [B, padded d] is its result. It and all values made from the residual x
    have the dtype of the products. What pads a width is zero and stays so, but in mixed, whose width is a layer's own.
    """

    rows: Tensor
    ids: Tensor
    start: Tensor
    cos: Tensor
    sin: Tensor
    x: Stream
    projected: Tensor
    router: Tensor
    mixed: Tensor
    gated: Tensor
    sums: Tensor
    stats: Tensor
    hidden: Tensor

    def first(self, batch: int) -> Buffers:
        """Of the first rows, in the same memory."""
        own = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return Buffers(
            **{name: value.rows(slice(batch)) if name == "x" else value[:batch] for name, value in own.items()}
        )


def make_buffers(weights: DecodeWeights, config: ModelConfig, inputs: Tensor) -> Buffers:
    """For as many rows as inputs [2,B] has."""
    batch, device = inputs.shape[1], inputs.device
    dtype, layers = weights.output.weight.dtype, weights.layers
    width, half = padded(config.d_model), config.head_dim // 2
    routers = [layer.mixer.router.num_outputs for layer in layers if not isinstance(layer.mixer, AttentionLayer)]
    windows = [layer.mixer.window for layer in layers if isinstance(layer.mixer, AttentionLayer)]
    pieces = config.num_heads * num_pieces(max(windows)) if windows else 0

    def zeros(columns: int, of: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros(batch, columns, dtype=of, device=device)

    return Buffers(
        rows=inputs[0],
        ids=inputs[1],
        start=torch.zeros(batch, dtype=torch.int64, device=device),
        cos=zeros(half),
        sin=zeros(half),
        x=make_stream(batch, config.d_model, dtype, device),
        projected=zeros(max(padded(layer.mixer.project.num_outputs) for layer in layers), dtype),
        router=zeros(padded(max(routers, default=1))),
        mixed=zeros(max(padded(layer.out.width) for layer in layers), dtype),
        gated=zeros(padded(config.mlp_hidden), dtype),
        sums=zeros(pieces * config.head_dim),
        stats=zeros(pieces * 2),
        hidden=zeros(width, dtype),
    )


class DecodeStep:
    """Weights and buffers of a model, and the states that it works on in place."""

    def __init__(self, weights: DecodeWeights, config: ModelConfig, states: State, max_batch: int) -> None:
        device = weights.embedding.device
        self._weights, self._config, self._states = weights, config, states
        self._inputs = torch.full((2 * _even(max_batch),), NO_ROW, dtype=torch.int64, device=device)
        self._views: dict[int, Tensor] = {}  # of the inputs, by batch: they take longer to make than a launch
        self._buffers = make_buffers(weights, config, self.inputs(max_batch))
        self._cut: dict[int, Buffers] = {}  # views too
        has_attention = any(isinstance(layer.mixer, AttentionLayer) for layer in weights.layers)
        self._turns = _turns(config, device) if has_attention else None
        self._may_chain = may_chain(device)

    def inputs(self, batch: int) -> Tensor:
        """[2, batch or one more] int64: rows of the pool, NO_ROW for padding, and ids."""
        if batch not in self._views:
            self._views[batch] = self._inputs[: 2 * _even(batch)].view(2, _even(batch))
        return self._views[batch]

    def buffers(self, batch: int) -> Buffers:
        """Those of the first `batch` rows."""
        if batch not in self._cut:
            inputs, first = self.inputs(batch), self._buffers.first(batch)
            self._cut[batch] = dataclasses.replace(first, rows=inputs[0, :batch], ids=inputs[1, :batch])
        return self._cut[batch]

    def run(self, batch: int) -> None:
        """Reads `inputs`; hidden vectors are in the buffers afterwards. No state is touched for padding."""
        on = self.buffers(batch)
        self.begin(on)
        for index in range(len(self._weights.layers)):
            self.block(index, on)
        gain, eps = self._weights.final_gain, self._config.norm_eps
        final_norm(rows=on.rows, x=on.x, gain=gain, hidden=on.hidden, eps=eps, is_chained=self._is_chained(on))

    def begin(self, on: Buffers) -> None:
        """Embeddings, and positions moved on."""
        begin_step(
            rows=on.rows,
            ids=on.ids,
            embedding=self._weights.embedding,
            factor=self._config.d_model**0.5,
            position=self._states[POSITION],
            start=on.start,
            x=on.x,
            turns=self._turns,
            cos=on.cos,
            sin=on.sin,
        )

    def block(self, index: int, on: Buffers) -> None:
        """One layer over x, in place."""
        layer, prefix = self._weights.layers[index], f"layers.{index}."
        self._linear(layer.mixer.project, on.x, on.projected)
        if isinstance(layer.mixer, AttentionLayer):
            self.read_ring(layer.mixer, prefix, on)
        else:
            self._linear(layer.mixer.router, on.x, on.router, is_beside=True)
            if isinstance(layer.mixer, KeyedLayer):
                self.move_keyed_slots(layer.mixer, prefix, on)
            else:
                self.move_slots(layer.mixer, prefix, on)
        self._linear(layer.out, on.mixed[:, : layer.out.width], on.x)
        self._linear(layer.up, on.x, on.gated)
        self._linear(layer.down, on.gated, on.x)

    def _linear(self, linear: Linear, x: Tensor | Stream, out: Tensor | Stream, *, is_beside: bool = False) -> None:
        run_linear(linear, x, out, is_chained=self._may_chain, is_beside=is_beside)

    def _is_chained(self, on: Buffers) -> bool:
        """Whether kernels over states begin early. With many rows they fill the device by themselves: what begins
        beside the products before only takes their place.
        """
        return self._may_chain and len(on.rows) <= ROWS

    def move_slots(self, layer: SlotLayer, prefix: str, on: Buffers) -> None:
        """Between the projections of a slot layer; its states in place."""
        slot_step_in_place(
            layer.slots,
            rows=on.rows,
            projected=on.projected,
            router=on.router,
            tail=self._states[prefix + "conv_tail"],
            slots=self._states[prefix + "slots"],
            out=on.mixed,
            is_chained=self._is_chained(on),
        )

    def move_keyed_slots(self, layer: KeyedLayer, prefix: str, on: Buffers) -> None:
        """Between the projections of a layer of keyed slots; its states in place."""
        keyed_step_in_place(
            layer.slots,
            rows=on.rows,
            projected=on.projected,
            rates=on.router,
            tail=self._states[prefix + "conv_tail"],
            slots=self._states[prefix + "slots"],
            out=on.mixed,
            is_chained=self._is_chained(on),
        )

    def read_ring(self, layer: AttentionLayer, prefix: str, on: Buffers) -> None:
        """Between the projections of an attention layer; its ring in place."""
        attend_in_place(
            rows=on.rows,
            start=on.start,
            projected=on.projected,
            cos=on.cos,
            sin=on.sin,
            scale=layer.scale,
            ring=self._states[prefix + "kv"],
            sums=on.sums,
            stats=on.stats,
            out=on.mixed,
            eps=self._config.norm_eps,
            is_chained=self._is_chained(on),
        )


def _even(batch: int) -> int:
    """So that the addresses of all inputs are multiples of 16 bytes: others make other programs."""
    return batch + batch % 2


def _turns(config: ModelConfig, device: torch.device) -> Tensor:
    """[K/2] fp64: full turns that a token adds to the angle of each pair of channels."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
    return (config.rope_base**-exponents / (2 * torch.pi)).to(device)
