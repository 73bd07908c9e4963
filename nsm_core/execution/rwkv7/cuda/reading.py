"""Tokens of many texts through all layers at once: the launches of one pass, over buffers that keep their addresses."""

from __future__ import annotations

import dataclasses
import functools

import torch
from torch import Tensor

from nsm_core.execution.cuda.kernels.chain import may_chain
from nsm_core.execution.rwkv7.cuda.kernels.heads import VECTORS, answer, prepare, scan
from nsm_core.execution.rwkv7.cuda.kernels.products import ROWS, run_products
from nsm_core.execution.rwkv7.cuda.kernels.tokens import Retained, begin, end, mix
from nsm_core.execution.rwkv7.cuda.segments import PassShape, Segments, Stages
from nsm_core.execution.rwkv7.cuda.weights import MIXTURES, CudaRwkv7Weights, LayerWeights
from nsm_core.rwkv7.config import Rwkv7Config
from nsm_core.rwkv7.model import CHANNEL_SHIFT, MATRIX, TIME_SHIFT
from nsm_core.state.spec import POSITION, State

NO_ROW = -1  # where a batch is padded
TOKEN_ROWS, IDS, OFFSETS, PIECE_ROWS, STARTS, COUNTS = range(6)  # what a pass is given, one after the other


@dataclasses.dataclass(frozen=True, slots=True)
class Buffers:
    """What the kernels hand to each other, [T, ...] each: see their own functions."""

    x: Tensor
    mixed: Tensor
    projected: Tensor
    inner: Tensor
    outer: Tensor
    first: Tensor
    moves: Tensor
    read: Tensor
    gated: Tensor
    time_normed: Tensor
    channel_normed: Tensor
    channel_mixed: Tensor
    squares: Tensor
    hidden: Tensor

    def of(self, tokens: slice) -> Buffers:
        """Those of some tokens."""
        return Buffers(**{field.name: getattr(self, field.name)[tokens] for field in dataclasses.fields(self)})


@dataclasses.dataclass(frozen=True, slots=True)
class Segment:
    """Tokens that go through a layer together: what was given of them and of their pieces, and their buffers."""

    rows: Tensor
    ids: Tensor
    offsets: Tensor
    piece_rows: Tensor
    starts: Tensor
    counts: Tensor
    on: Buffers
    has_few_texts: bool
    is_chained: bool


class Pass:
    """Weights and buffers of a model, and the states that it works on in place. `most_tokens`: of one pass, even."""

    def __init__(self, weights: CudaRwkv7Weights, config: Rwkv7Config, states: State, most_tokens: int) -> None:
        self._weights, self._states = weights, states
        device = weights.embedding.device
        self._given = torch.full((COUNTS + 1, most_tokens), NO_ROW, dtype=torch.int64, device=device)
        self._buffers = _make_buffers(weights, config, most_tokens)
        self._may_chain = may_chain(device)
        self._segments = Segments(device, config.num_layers + 1)

    def given(self, shape: PassShape) -> Tensor:
        """[6, shape.width] int64, to be written before `run`.

        Of each token the pool's row (NO_ROW for padding), its id and its offset (see tokens.py). Of each piece of text
        its row, its first token in its segment and its number of tokens: `num_pieces` of each segment.
        """
        return self._given[:, : shape.width]

    def hidden(self, num_tokens: int) -> Tensor:
        """[T, D] in the dtype of the products, after `run`."""
        return self._buffers.hidden[:num_tokens]

    def run(self, shape: PassShape) -> None:
        """Reads what was `given`. No state is touched for padding."""
        segments = [self._segment(shape, index) for index in range(shape.num_segments)]
        self._segments.run([functools.partial(self._read, segment) for segment in segments])

    def _segment(self, shape: PassShape, index: int) -> Segment:
        given, first = self._given, index * shape.segment_length
        tokens = slice(first, min(first + shape.segment_length, shape.num_tokens))
        pieces = slice(index * shape.num_pieces, (index + 1) * shape.num_pieces)
        return Segment(
            rows=given[TOKEN_ROWS, tokens],
            ids=given[IDS, tokens],
            offsets=given[OFFSETS, tokens],
            piece_rows=given[PIECE_ROWS, pieces],
            starts=given[STARTS, pieces],
            counts=given[COUNTS, pieces],
            on=self._buffers.of(tokens),
            has_few_texts=shape.has_few_texts,
            is_chained=self._may_chain and shape.num_tokens <= ROWS,  # many tokens fill the device by themselves
        )

    def _read(self, segment: Segment, stages: Stages) -> None:
        """All layers. Stage 0 has the positions and the states of the first layer, the last one nothing else."""
        on = segment.on
        stages.wait(0)
        begin(
            rows=segment.rows,
            offsets=segment.offsets,
            ids=segment.ids,
            embedding=self._weights.embedding,
            norm=self._weights.first_norm,
            position=self._states[POSITION],
            x=on.x,
        )
        retained: Retained | None = None
        for index, layer in enumerate(self._weights.layers):
            retained = self._layer(index, layer, segment, retained, stages)
        end(
            rows=segment.rows,
            offsets=segment.offsets,
            x=on.x,
            norm=self._weights.last_norm,
            retained=retained,
            out=on.hidden,
            is_chained=segment.is_chained,
        )
        stages.written(len(self._weights.layers))

    def _layer(
        self, index: int, layer: LayerWeights, segment: Segment, retained: Retained | None, stages: Stages
    ) -> Retained:
        """One layer over x. `retained`: what the norm before left to be written into the state; returns its own."""
        on, is_chained = segment.on, segment.is_chained
        states = {name: self._states[f"layers.{index}.{name}"] for name in (TIME_SHIFT, CHANNEL_SHIFT, MATRIX)}
        time, channel = Retained(on.time_normed, states[TIME_SHIFT]), Retained(on.channel_normed, states[CHANNEL_SHIFT])

        multiply = functools.partial(run_products, is_chained=is_chained)
        mix_tokens = functools.partial(mix, rows=segment.rows, offsets=segment.offsets, x=on.x, is_chained=is_chained)
        stages.wait(index + 1)
        mix_tokens(norm=layer.time_norm, shares=layer.time_shares, retained=retained, into=time, out=on.mixed)
        stages.written(index)
        multiply(layer.project, on.mixed, out=on.projected, inner=on.inner)
        multiply(layer.outer, on.inner, out=on.outer)
        self._move(layer, states[MATRIX], segment)
        multiply(layer.output, on.gated, out=on.x, is_added=True)
        mix_tokens(
            norm=layer.channel_norm, shares=layer.channel_share, retained=time, into=channel, out=on.channel_mixed
        )
        multiply(layer.channel_key, on.channel_mixed, inner=on.squares)
        multiply(layer.channel_value, on.squares, out=on.x, is_added=True)
        return channel

    def _move(self, layer: LayerWeights, matrix: Tensor, segment: Segment) -> None:
        """Between the products of a time mix; the heads' matrices in place."""
        at, on, is_chained = layer.columns, segment.on, segment.is_chained
        prepare(
            layer.heads,
            at,
            projected=on.projected,
            outer=on.outer,
            first=on.first,
            moves=on.moves,
            is_chained=is_chained,
        )
        scan(
            rows=segment.piece_rows,
            starts=segment.starts,
            counts=segment.counts,
            moves=on.moves,
            matrix=matrix,
            read=on.read,
            has_few_texts=segment.has_few_texts,
            is_chained=is_chained,
        )
        answer(layer.heads, at, read=on.read, moves=on.moves, outer=on.outer, out=on.gated, is_chained=is_chained)


def _make_buffers(weights: CudaRwkv7Weights, config: Rwkv7Config, most_tokens: int) -> Buffers:
    dtype, device, width = weights.head.weight.dtype, weights.embedding.device, config.width

    def zeros(*shape: int, of: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros(most_tokens, *shape, dtype=of, device=device)

    project = max(layer.project.num_columns for layer in weights.layers)
    outer = max(layer.outer.num_columns for layer in weights.layers)
    return Buffers(
        x=zeros(width),
        mixed=zeros(len(MIXTURES) * width, of=dtype),
        projected=zeros(project),
        inner=zeros(project, of=dtype),
        outer=zeros(outer),
        first=zeros(width),
        moves=zeros(config.num_heads, VECTORS, config.head_size),
        read=zeros(width),
        gated=zeros(width, of=dtype),
        time_normed=zeros(width),
        channel_normed=zeros(width),
        channel_mixed=zeros(width, of=dtype),
        squares=zeros(config.hidden, of=dtype),
        hidden=zeros(width, of=dtype),
    )
