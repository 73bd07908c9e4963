"""The whole model: tokens in, hidden vectors and a fixed-size state out."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from nsm_core.config import ModelConfig
from nsm_core.model.layers import PulseBlock, Segments
from nsm_core.state.spec import State, StateSpec, TensorSpec

# A long prompt is read in pieces of this many tokens: activations stay bounded whatever its length.
SUPER_CHUNK_LEN = 2048


def _state_spec(config: ModelConfig) -> StateSpec:
    slots = (config.num_heads, config.num_memory_slots, 2 * config.head_dim)
    tail = (config.conv_taps - 1, 3 * config.d_model)
    tensors = [TensorSpec("position", (), torch.int64)]
    for layer in range(config.num_layers):
        # fp32 on purpose: a session adds one rounding error per token, for its whole life
        tensors.append(TensorSpec(f"layers.{layer}.slots", slots, torch.float32))
        tensors.append(TensorSpec(f"layers.{layer}.conv_tail", tail, torch.float32))
    return StateSpec(tuple(tensors))


class NsmModel(nn.Module):
    """A stack of PULSE blocks with tied input and output embeddings.

    Three forms agree within the tolerances of docs/model.md: `forward` over any split of a text, `step` token by token,
    and the recurrent reference in `nsm_core.ops.slot_scan.reference`. All are functional: a given state stays as is.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.state_spec = _state_spec(config)
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        nn.init.normal_(self.embedding.weight, std=config.d_model**-0.5)
        self.blocks = nn.ModuleList(PulseBlock(config) for _ in range(config.num_layers))
        self.final_norm = nn.RMSNorm(config.d_model, eps=config.norm_eps)
        self.checkpoint_blocks = False  # training only: recompute blocks in the backward pass

    @property
    def layers(self) -> list[PulseBlock]:
        """The blocks, bottom first."""
        return [block for block in self.blocks if isinstance(block, PulseBlock)]

    def initial_state(self, batch_size: int) -> State:
        """The learned start of a sequence, `batch_size` times; position 0, nothing in the convolutions."""
        state = self.state_spec.zeros(batch_size, self.embedding.weight.device)
        for layer, block in enumerate(self.layers):
            initial = block.mixer.initial_slots.to(torch.float32)
            state[f"layers.{layer}.slots"] = initial.expand(batch_size, -1, -1, -1).clone()
        return state

    def forward(self, ids: Tensor, state: State, lengths: Tensor | None = None) -> tuple[Tensor, State]:
        """Reads ids [B,T] (any T >= 1) on top of `state`; returns hidden [B,T,d] and the state after each row's end.

        `lengths` [B] int64 in [0, T]: rows are right-padded; hidden vectors of padding are meaningless, and a row of
        length 0 keeps its state.
        """
        pieces, start = [], 0
        for piece in torch.split(ids, SUPER_CHUNK_LEN, dim=1):
            segments = Segments()
            if lengths is not None:
                rest = (lengths - start).clamp(min=0, max=piece.shape[1])
                valid = torch.arange(piece.shape[1], device=ids.device) < rest[:, None]
                segments = Segments(lengths=rest, valid=valid)
            hidden, state = self.read(piece, state, segments)
            pieces.append(hidden)
            start += piece.shape[1]
        return (pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)), state

    def read(self, ids: Tensor, state: State, segments: Segments) -> tuple[Tensor, State]:
        """One piece of `forward`, with full control over padding and document starts (training)."""
        x = self.embedding(ids) * self.config.d_model**0.5
        num_read = ids.shape[1] if segments.lengths is None else segments.lengths
        new_state: State = {"position": state["position"] + num_read}
        for layer, block in enumerate(self.layers):
            slots, tail = f"layers.{layer}.slots", f"layers.{layer}.conv_tail"
            if self.checkpoint_blocks and self.training:
                x, *carried = checkpoint(block, x, state[slots], state[tail], segments, use_reentrant=False)
            else:
                x, *carried = block(x, state[slots], state[tail], segments)
            new_state[slots], new_state[tail] = carried
        return self.final_norm(x), new_state

    def step(self, ids: Tensor, state: State) -> tuple[Tensor, State]:
        """One token a row: ids [B] -> hidden [B,d] and the new state."""
        x = self.embedding(ids) * self.config.d_model**0.5
        new_state: State = {"position": state["position"] + 1}
        for layer, block in enumerate(self.layers):
            slots, tail = f"layers.{layer}.slots", f"layers.{layer}.conv_tail"
            x, new_state[slots], new_state[tail] = block.step(x, state[slots], state[tail])
        return self.final_norm(x), new_state

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [..., d] -> logits [..., V] in fp32."""
        return nn.functional.linear(hidden, self.embedding.weight).float()
