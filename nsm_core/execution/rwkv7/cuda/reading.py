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

    def of(self, num_tokens: int) -> Buffers:
        """Those of the first tokens."""
        return Buffers(**{field.name: getattr(self, field.name)[:num_tokens] for field in dataclasses.fields(self)})


class Pass:
    """Weights and buffers of a model, and the states that it works on in offset. `most_tokens`: of one pass, even."""

    def __init__(self, weights: CudaRwkv7Weights, config: Rwkv7Config, states: State, most_tokens: int) -> None:
        self._weights, self._states = weights, states
        self._given = torch.full((COUNTS + 1, most_tokens), NO_ROW, dtype=torch.int64, device=weights.embedding.device)
        self._buffers = _make_buffers(weights, config, most_tokens)
        self._may_chain = may_chain(weights.embedding.device)

    def given(self, num_tokens: int, num_pieces: int) -> Tensor:
        """[6, the larger number] int64, to be written before `run`.

        Of each token the pool's row (NO_ROW for padding), its id and its offset (see tokens.py); of each piece of text
        its row, its first token and its number of tokens.
        """
        return self._given[:, : max(num_tokens, num_pieces)]

    def hidden(self, num_tokens: int) -> Tensor:
        """[T, D] in the dtype of the products, after `run`."""
        return self._buffers.hidden[:num_tokens]

    def run(self, num_tokens: int, num_pieces: int) -> None:
        """Reads what was `given`. No state is touched for padding."""
        on, given = self._buffers.of(num_tokens), self._given
        rows, offsets = given[TOKEN_ROWS, :num_tokens], given[OFFSETS, :num_tokens]
        begin(
            rows=rows,
            offsets=offsets,
            ids=given[IDS, :num_tokens],
            embedding=self._weights.embedding,
            norm=self._weights.first_norm,
            position=self._states[POSITION],
            x=on.x,
        )
        is_chained = self._may_chain and num_tokens <= ROWS  # many tokens fill the device by themselves
        retained: Retained | None = None
        for index, layer in enumerate(self._weights.layers):
            retained = self._layer(index, layer, on, num_pieces, retained, is_chained)
        norm = self._weights.last_norm
        end(rows=rows, offsets=offsets, x=on.x, norm=norm, retained=retained, out=on.hidden, is_chained=is_chained)

    def _layer(
        self, index: int, layer: LayerWeights, on: Buffers, num_pieces: int, retained: Retained | None, is_chained: bool
    ) -> Retained:
        """One layer over x. `retained`: what the norm before left to be written into the state; returns its own."""
        given, num_tokens = self._given, len(on.x)
        rows, offsets = given[TOKEN_ROWS, :num_tokens], given[OFFSETS, :num_tokens]
        states = {name: self._states[f"layers.{index}.{name}"] for name in (TIME_SHIFT, CHANNEL_SHIFT, MATRIX)}
        time, channel = Retained(on.time_normed, states[TIME_SHIFT]), Retained(on.channel_normed, states[CHANNEL_SHIFT])

        multiply = functools.partial(run_products, is_chained=is_chained)
        mix_tokens = functools.partial(mix, rows=rows, offsets=offsets, x=on.x, is_chained=is_chained)
        mix_tokens(norm=layer.time_norm, shares=layer.time_shares, retained=retained, into=time, out=on.mixed)
        multiply(layer.project, on.mixed, out=on.projected, inner=on.inner)
        multiply(layer.outer, on.inner, out=on.outer)
        self._move(layer, states[MATRIX], on, num_pieces, is_chained)
        multiply(layer.output, on.gated, out=on.x, is_added=True)
        mix_tokens(
            norm=layer.channel_norm, shares=layer.channel_share, retained=time, into=channel, out=on.channel_mixed
        )
        multiply(layer.channel_key, on.channel_mixed, inner=on.squares)
        multiply(layer.channel_value, on.squares, out=on.x, is_added=True)
        return channel

    def _move(self, layer: LayerWeights, matrix: Tensor, on: Buffers, num_pieces: int, is_chained: bool) -> None:
        """Between the products of a time mix; the heads' matrices in offset."""
        at = layer.columns
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
            rows=self._given[PIECE_ROWS, :num_pieces],
            starts=self._given[STARTS, :num_pieces],
            counts=self._given[COUNTS, :num_pieces],
            moves=on.moves,
            matrix=matrix,
            read=on.read,
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
