"""The whole RWKV-7 model: tokens in, hidden vectors and a fixed-size state out."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch
from torch import Tensor

from nsm_core.rwkv7.config import Rwkv7Config
from nsm_core.rwkv7.time_mix import Scan, channel_mix, last_tokens, layer_norm, state_scan, time_mix
from nsm_core.rwkv7.weights import Layer, Weights, load_weights
from nsm_core.state.spec import POSITION, State, StateSpec, TensorSpec

# A long prompt is read in pieces of this many tokens: activations stay bounded whatever its length.
PIECE_LEN = 512
TIME_SHIFT, CHANNEL_SHIFT, MATRIX = "time_shift", "channel_shift", "matrix"


def state_spec(config: Rwkv7Config) -> StateSpec:
    """Per layer: the normalised token before, of both mixers [D], and a matrix [K, V] of each head, its rows by key.

    fp32 on purpose: a session adds one rounding error per token, for its whole life.
    """
    size = config.head_size
    shapes = {
        TIME_SHIFT: (config.width,),
        CHANNEL_SHIFT: (config.width,),
        MATRIX: (config.num_heads, size, size),
    }
    tensors = [TensorSpec(POSITION, (), torch.int64)]
    for layer in range(config.num_layers):
        tensors.extend(TensorSpec(f"layers.{layer}.{name}", shape, torch.float32) for name, shape in shapes.items())
    return StateSpec(tuple(tensors))


class Rwkv7Model:
    """RWKV-7 in fp32 PyTorch, the reference of its kernels. A SequenceModel; weights have no gradients, states may.

    Nothing is read from `tensors` before the first use of `weights`, so that an executor with a layout of its own can
    pack the tensors one by one and these never exist. `num_ids`: how many ids have logits, the first; tokenizers have
    some fewer than models have rows.
    """

    def __init__(
        self,
        config: Rwkv7Config,
        tensors: Mapping[str, Tensor],
        device: torch.device | str = "cpu",
        num_ids: int | None = None,
    ) -> None:
        self.config = config
        self.num_ids = config.vocab_size if num_ids is None else num_ids
        self.tensors = tensors
        self.device = torch.device(device)
        self.state_spec = state_spec(config)
        self.scan: Scan = state_scan  # training may replace it

    @functools.cached_property
    def weights(self) -> Weights:
        """All tensors in fp32 on the device. Raises CheckpointError that names the tensor."""
        return load_weights(self.config, self.tensors, self.device)

    def initial_state(self, batch_size: int) -> State:
        """The start of a text, `batch_size` times: zeros."""
        return self.state_spec.zeros(batch_size, self.device)

    def forward(self, ids: Tensor, state: State, lengths: Tensor | None = None) -> tuple[Tensor, State]:
        """Reads ids [B,T] (any T >= 1) on top of `state`; returns hidden [B,T,D] and the state after each row's end.

        `lengths` [B] int64 in [0, T]: rows are right-padded; hidden vectors of padding are meaningless, and a row of
        length 0 keeps its state.
        """
        pieces, start = [], 0
        for piece in torch.split(ids, PIECE_LEN, dim=1):
            rest = None if lengths is None else (lengths - start).clamp(min=0, max=piece.shape[1])
            hidden, state = self._read(piece, state, rest)
            pieces.append(hidden)
            start += piece.shape[1]
        return (pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)), state

    def step(self, ids: Tensor, state: State) -> tuple[Tensor, State]:
        """One token a row: ids [B] -> hidden [B,D] and the new state."""
        hidden, state = self._read(ids[:, None], state, None)
        return hidden[:, 0], state

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [..., D] -> logits [..., num_ids] in fp32."""
        return torch.nn.functional.linear(hidden, self.weights.head[: self.num_ids])

    def _read(self, ids: Tensor, state: State, lengths: Tensor | None) -> tuple[Tensor, State]:
        weights, eps = self.weights, self.config.norm_eps
        valid = None if lengths is None else torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]
        num_read = ids.shape[1] if lengths is None else lengths
        new_state: State = {POSITION: state[POSITION] + num_read}
        x = layer_norm(torch.nn.functional.embedding(ids, weights.embedding), weights.first_norm, eps)
        first_value: Tensor | None = None
        for index, layer in enumerate(weights.layers):
            x, first_value = self._layer(index, layer, x, state, new_state, first_value, lengths, valid)
        return layer_norm(x, weights.last_norm, eps), new_state

    def _layer(
        self,
        index: int,
        layer: Layer,
        x: Tensor,
        state: State,
        new_state: State,
        first_value: Tensor | None,
        lengths: Tensor | None,
        valid: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Writes the layer's part of `new_state`."""
        prefix, eps = f"layers.{index}.", self.config.norm_eps
        normed, before = layer_norm(x, layer.time_norm, eps), state[prefix + TIME_SHIFT]
        mixed, matrix, first_value = time_mix(
            layer.time_mix,
            normed,
            before=before,
            matrix=state[prefix + MATRIX],
            first_value=first_value,
            valid=valid,
            head_norm_eps=self.config.head_norm_eps,
            scan=self.scan,
        )
        new_state[prefix + MATRIX], new_state[prefix + TIME_SHIFT] = matrix, last_tokens(normed, before, lengths)
        x = x + mixed
        normed, before = layer_norm(x, layer.channel_norm, eps), state[prefix + CHANNEL_SHIFT]
        new_state[prefix + CHANNEL_SHIFT] = last_tokens(normed, before, lengths)
        return x + channel_mix(layer.channel_mix, normed, before), first_value
