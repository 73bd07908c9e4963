"""The whole model: tokens in, hidden vectors and a fixed-size state out."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from nsm_core.config import ModelConfig
from nsm_core.model.block import Block
from nsm_core.model.mixer import Mixer
from nsm_core.model.registry import build_mixers
from nsm_core.model.segments import Segments, token_positions
from nsm_core.state.spec import POSITION, State, StateSpec, TensorSpec

# A long prompt is read in pieces of this many tokens: activations stay bounded whatever its length.
SUPER_CHUNK_LEN = 2048


def _state_spec(mixers: list[Mixer]) -> StateSpec:
    tensors = [TensorSpec(POSITION, (), torch.int64)]
    for layer, mixer in enumerate(mixers):
        # fp32 on purpose: a session adds one rounding error per token, for its whole life
        shapes = mixer.state_shapes()
        tensors.extend(TensorSpec(f"layers.{layer}.{name}", shape, torch.float32) for name, shape in shapes.items())
    return StateSpec(tuple(tensors))


def _layer_state(state: State, layer: int) -> State:
    prefix = f"layers.{layer}."
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}


class NsmModel(nn.Module):
    """A stack of blocks, of the kinds that the layer pattern names, with tied input and output embeddings.

    `forward` over any split of a text and `step` token by token agree within the tolerances of
    benchmarks/notes/model.md. Both are functional: a given state stays as it is.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        nn.init.normal_(self.embedding.weight, std=config.d_model**-0.5)
        mixers = build_mixers(config)
        self.state_spec = _state_spec(mixers)
        self.blocks = nn.ModuleList(Block(config, mixer) for mixer in mixers)
        self.final_norm = nn.RMSNorm(config.d_model, eps=config.norm_eps)
        self.checkpoint_blocks = False  # training only: recompute blocks in the backward pass

    @property
    def layers(self) -> list[Block]:
        """The blocks, bottom first."""
        return [block for block in self.blocks if isinstance(block, Block)]

    def initial_state(self, batch_size: int) -> State:
        """The start of a text, `batch_size` times: learned slots, position 0, nothing read."""
        position = torch.zeros(batch_size, dtype=torch.int64, device=self.final_norm.weight.device)
        state: State = {POSITION: position}
        for layer, block in enumerate(self.layers):
            initial = block.mixer.initial_state(batch_size)
            state.update({f"layers.{layer}.{name}": value for name, value in initial.items()})
        return state

    def forward(
        self, ids: Tensor, state: State, lengths: Tensor | None = None, *, piece_len: int = SUPER_CHUNK_LEN
    ) -> tuple[Tensor, State]:
        """Reads ids [B,T] (any T >= 1) on top of `state`; returns hidden [B,T,d] and the state after each row's end.

        `lengths` [B] int64 in [0, T]: rows are right-padded; hidden vectors of padding are meaningless, and a row of
        length 0 keeps its state. `piece_len`: tokens of a row that are read at a time.
        """
        pieces, start = [], 0
        for piece in torch.split(ids, piece_len, dim=1):
            rest = valid = None
            if lengths is not None:
                rest = (lengths - start).clamp(min=0, max=piece.shape[1])
                valid = torch.arange(piece.shape[1], device=ids.device) < rest[:, None]
            hidden, state = self.read(piece, state, lengths=rest, valid=valid)
            pieces.append(hidden)
            start += piece.shape[1]
        return (pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)), state

    def read(
        self,
        ids: Tensor,
        state: State,
        *,
        lengths: Tensor | None = None,
        valid: Tensor | None = None,
        reset: Tensor | None = None,
        is_fresh: bool = False,
        num_slots: Tensor | None = None,
    ) -> tuple[Tensor, State]:
        """One piece of `forward`, with full control over padding, document starts and slots (see Segments)."""
        positions = token_positions(state[POSITION], ids.shape[1], reset)
        segments = Segments(positions, lengths, valid, reset, is_fresh, num_slots)
        x = self.embedding(ids) * self.config.d_model**0.5
        new_state: State = {POSITION: segments.end}
        for layer, block in enumerate(self.layers):
            carried = _layer_state(state, layer)
            if self.checkpoint_blocks and self.training:
                x, carried = checkpoint(block, x, carried, segments, use_reentrant=False)
            else:
                x, carried = block(x, carried, segments)
            new_state.update({f"layers.{layer}.{name}": value for name, value in carried.items()})
        return self.final_norm(x), new_state

    def step(self, ids: Tensor, state: State) -> tuple[Tensor, State]:
        """One token a row: ids [B] -> hidden [B,d] and the new state."""
        new_state: State = {POSITION: state[POSITION] + 1}

        def keep(layer: int, carried: State) -> None:
            new_state.update({f"layers.{layer}.{name}": value for name, value in carried.items()})

        return self._step(ids, state, keep), new_state

    def peek(self, ids: Tensor, state: State) -> Tensor:
        """The hidden vectors of `step` without the new state: each layer's is freed before the next layer runs."""
        return self._step(ids, state, lambda layer, carried: None)

    def _step(self, ids: Tensor, state: State, keep: Callable[[int, State], None]) -> Tensor:
        """`keep` is given each layer's new state."""
        x = self.embedding(ids) * self.config.d_model**0.5
        for layer, block in enumerate(self.layers):
            x, carried = block.step(x, _layer_state(state, layer), state[POSITION])
            keep(layer, carried)
            del carried
        hidden: Tensor = self.final_norm(x)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [..., d] -> logits [..., V] in fp32."""
        return nn.functional.linear(hidden, self.embedding.weight).float()
