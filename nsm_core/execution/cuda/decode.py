"""One token for each row of a batch: the launches of a step, over buffers that keep their addresses."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from nsm_core.config import ModelConfig
from nsm_core.execution.cuda.kernels.attention import attend_in_place, num_pieces
from nsm_core.execution.cuda.kernels.linear import padded, run_linear
from nsm_core.execution.cuda.kernels.rows import begin_step, final_norm
from nsm_core.execution.cuda.kernels.slots import slot_step_in_place
from nsm_core.execution.cuda.weights import AttentionLayer, DecodeWeights, SlotLayer
from nsm_core.state.spec import POSITION, State

NO_ROW = -1  # where a batch is padded


class Buffers:
    """What a step reads and writes besides weights and states, for at most `max_batch` rows.

    inputs int64: rows of the pool, then ids, where `DecodeStep.inputs` says. hidden [B, padded d] fp32 is the result.
    `operand` is x in the dtype of the products, x itself where that is fp32. What pads a width is zero and stays so.
    """

    def __init__(self, weights: DecodeWeights, config: ModelConfig, max_batch: int, device: torch.device) -> None:
        dtype = weights.output.weight.dtype
        layers = weights.layers
        width, half = padded(config.d_model), config.head_dim // 2

        def rows_of(columns: int, of: torch.dtype) -> Tensor:
            return torch.zeros(max_batch, columns, dtype=of, device=device)

        self.inputs = torch.full((2 * max_batch + 2,), NO_ROW, dtype=torch.int64, device=device)
        self.start = torch.zeros(max_batch, dtype=torch.int64, device=device)
        self.cos, self.sin = rows_of(half, torch.float32), rows_of(half, torch.float32)
        self.x, self.hidden = rows_of(width, torch.float32), rows_of(width, torch.float32)
        self.operand = self.x if dtype == torch.float32 else rows_of(width, dtype)
        self.projected = rows_of(max(padded(layer.mixer.project.num_outputs) for layer in layers), dtype)
        routers = [layer.mixer.router.num_outputs for layer in layers if isinstance(layer.mixer, SlotLayer)]
        self.router = rows_of(padded(max(routers, default=1)), torch.float32)
        self.mixed = rows_of(width, dtype)
        self.gated = rows_of(padded(config.mlp_hidden), dtype)
        windows = [layer.mixer.window for layer in layers if isinstance(layer.mixer, AttentionLayer)]
        pieces = config.num_heads * num_pieces(max(windows, default=1)) if windows else 0
        self.sums, self.stats = rows_of(pieces * config.head_dim, torch.float32), rows_of(pieces * 2, torch.float32)


class DecodeStep:
    """Weights and buffers of a model, and the states that it works on in place."""

    def __init__(self, weights: DecodeWeights, config: ModelConfig, states: State, max_batch: int) -> None:
        device = weights.embedding.device
        self._weights, self._config, self._states = weights, config, states
        self.buffers = Buffers(weights, config, max_batch, device)
        has_attention = any(isinstance(layer.mixer, AttentionLayer) for layer in weights.layers)
        self._turns = _turns(config, device) if has_attention else None
        self._router_stream = (
            torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        )

    def inputs(self, batch: int) -> Tensor:
        """[2, batch or one more] int64: rows of the pool, NO_ROW for padding, and ids."""
        even = batch + batch % 2  # so that addresses are multiples of 16 bytes: others are other programs
        return self.buffers.inputs[: 2 * even].view(2, even)

    def run(self, batch: int) -> None:
        """Reads `inputs`; hidden vectors are there afterwards. No state is read or written for padding."""
        self.begin(batch)
        for index in range(len(self._weights.layers)):
            self.block(index, batch)
        buffers, gain, eps = self.buffers, self._weights.final_gain, self._config.norm_eps
        final_norm(rows=self._rows(batch), x=buffers.x[:batch], gain=gain, hidden=buffers.hidden, eps=eps)

    def begin(self, batch: int) -> None:
        """Embeddings, and positions moved on."""
        buffers = self.buffers
        begin_step(
            rows=self._rows(batch),
            ids=self.inputs(batch)[1, :batch],
            embedding=self._weights.embedding,
            factor=self._config.d_model**0.5,
            position=self._states[POSITION],
            start=buffers.start,
            x=buffers.x[:batch],
            copy=self._copy(batch),
            turns=self._turns,
            cos=buffers.cos,
            sin=buffers.sin,
        )

    def block(self, index: int, batch: int) -> None:
        """One layer over x, in place."""
        layer, buffers = self._weights.layers[index], self.buffers
        x, operand, copy = buffers.x[:batch], buffers.operand[:batch], self._copy(batch)
        if isinstance(layer.mixer, SlotLayer):
            self.mix_slots(layer.mixer, f"layers.{index}.", batch)
        else:
            self.attend(layer.mixer, f"layers.{index}.", batch)
        run_linear(layer.out, buffers.mixed[:batch], x, residual=x, copy=copy)
        run_linear(layer.up, operand, buffers.gated[:batch])
        run_linear(layer.down, buffers.gated[:batch], x, residual=x, copy=copy)

    def _rows(self, batch: int) -> Tensor:
        return self.inputs(batch)[0, :batch]

    def _copy(self, batch: int) -> Tensor | None:
        """Where the residual stream goes in the dtype of the products, if that is another."""
        return None if self.buffers.operand is self.buffers.x else self.buffers.operand[:batch]

    def mix_slots(self, layer: SlotLayer, prefix: str, batch: int) -> None:
        """Both projections, then what lies between them and the one back."""
        buffers = self.buffers
        with self._beside():
            run_linear(layer.router, buffers.x[:batch], buffers.router[:batch])
        run_linear(layer.project, buffers.operand[:batch], buffers.projected[:batch])
        self._wait_for_router()
        self.move_slots(layer, prefix, batch)

    def move_slots(self, layer: SlotLayer, prefix: str, batch: int) -> None:
        """The states of a slot layer, in place."""
        slot_step_in_place(
            layer.slots,
            rows=self._rows(batch),
            projected=self.buffers.projected,
            router=self.buffers.router,
            tail=self._states[prefix + "conv_tail"],
            slots=self._states[prefix + "slots"],
            out=self.buffers.mixed,
        )

    def attend(self, layer: AttentionLayer, prefix: str, batch: int) -> None:
        """The projection, then what lies between it and the one back."""
        buffers = self.buffers
        run_linear(layer.project, buffers.operand[:batch], buffers.projected[:batch])
        self.read_ring(layer, prefix, batch)

    def read_ring(self, layer: AttentionLayer, prefix: str, batch: int) -> None:
        """The ring of an attention layer, in place."""
        buffers = self.buffers
        attend_in_place(
            rows=self._rows(batch),
            start=buffers.start,
            projected=buffers.projected,
            cos=buffers.cos,
            sin=buffers.sin,
            scale=layer.scale,
            ring=self._states[prefix + "kv"],
            sums=buffers.sums,
            stats=buffers.stats,
            out=buffers.mixed,
            eps=self._config.norm_eps,
        )

    @contextlib.contextmanager
    def _beside(self) -> Iterator[None]:
        """On a stream of its own: the two projections of a layer leave room for each other."""
        if self._router_stream is None:
            yield
            return
        self._router_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._router_stream):
            yield

    def _wait_for_router(self) -> None:
        if self._router_stream is not None:
            torch.cuda.current_stream().wait_stream(self._router_stream)


def _turns(config: ModelConfig, device: torch.device) -> Tensor:
    """[K/2] fp64: full turns that a token adds to the angle of each pair of channels."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
    return (config.rope_base**-exponents / (2 * torch.pi)).to(device)
