"""Blocks for prompts on a GPU: the same layers, with what lies between the products in a few kernels.

A prompt of some tokens takes as long as its launches do. As it is written, a block is about 60 of them.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from nsm_core.execution.cuda.kernels.prompt_attention import attend_in_order, keep_ring, read_window
from nsm_core.execution.cuda.kernels.prompt_keyed import Taps, gated_output, read_context, read_rates
from nsm_core.execution.cuda.kernels.prompt_rows import add_norm_rows, gate_rows, norm_rows
from nsm_core.model.attention import WindowAttention
from nsm_core.model.block import Block
from nsm_core.model.keyed import KeyedMixer
from nsm_core.model.segments import Segments
from nsm_core.ops.keyed_scan.dispatch import keyed_scan
from nsm_core.state.spec import State


class PromptBlock(Block):
    """A block of which `forward` reads texts that start nowhere within it. Its products are in `dtype`."""

    has_full_input = False  # whether the mixer reads the norm in fp32 too

    def __init__(self, block: Block, dtype: torch.dtype) -> None:
        nn.Module.__init__(self)  # it takes over what the block has
        self.mixer_norm, self.mlp_norm, self.mlp, self.dropout = (
            block.mixer_norm,
            block.mlp_norm,
            block.mlp,
            block.dropout,
        )
        self.mixer, self._dtype = block.mixer, dtype

    def forward(self, x: Tensor, state: State, segments: Segments) -> tuple[Tensor, State]:
        full, low = norm_rows(
            x, self.mixer_norm.weight, _eps(self.mixer_norm), self._dtype, has_full=self.has_full_input
        )
        mixed, state = self._mix(full, low, state, segments)
        x, low = add_norm_rows(x, mixed, self.mlp_norm.weight, _eps(self.mlp_norm), self._dtype)
        return x + self.mlp.down(gate_rows(self.mlp.up(low))), state

    def _mix(self, full: Tensor, low: Tensor, state: State, segments: Segments) -> tuple[Tensor, State]:
        """What the mixer adds to tokens [B,T,d], normed; and its new state."""
        raise NotImplementedError


class KeyedPromptBlock(PromptBlock):
    """With keyed slots."""

    has_full_input = True

    def __init__(self, block: Block, mixer: KeyedMixer, dtype: torch.dtype) -> None:
        super().__init__(block, dtype)
        conv = mixer.conv
        self._keyed = mixer
        self._taps = Taps(conv.read.detach(), conv.write.detach(), conv.value.detach(), mixer.heads)

    def _mix(self, full: Tensor, low: Tensor, state: State, segments: Segments) -> tuple[Tensor, State]:
        mixer = self._keyed
        projected = mixer.project(low)
        strength, log_decay = read_rates(mixer.rates(full), segments.lengths)
        q, k, v, tail = read_context(projected, self._taps, state["conv_tail"], segments.lengths)
        read, slots = keyed_scan(q=q, k=k, v=v, strength=strength, log_decay=log_decay, state=state["slots"])
        out = gated_output(read, v, projected, mixer.out_norm, mixer.skip, mixer.eps)
        return mixer.out(out), {"slots": slots, "conv_tail": tail}


class WindowPromptBlock(PromptBlock):
    """With attention over a window."""

    def __init__(self, block: Block, mixer: WindowAttention, dtype: torch.dtype) -> None:
        super().__init__(block, dtype)
        self._attention = mixer
        pairs = torch.arange(0, mixer.head_dim, 2, dtype=torch.float64, device=mixer.log_scale.device)
        self._turns = mixer.rope_base ** -(pairs / mixer.head_dim) / (2 * math.pi)

    def _mix(self, full: Tensor, low: Tensor, state: State, segments: Segments) -> tuple[Tensor, State]:
        mixer, ring, positions = self._attention, state["kv"], segments.positions
        q, kv = read_window(
            mixer.project(low), positions, ring, turns=self._turns, log_scale=mixer.log_scale, eps=mixer.eps
        )
        read = attend_in_order(q, kv, positions, mixer.window)
        return mixer.out(read), {"kv": keep_ring(kv, positions, segments.lengths, ring)}


def prompt_block(block: Block, dtype: torch.dtype) -> Block:
    """The block for prompts; itself if its layer has no such kernels."""
    if isinstance(block.mixer, KeyedMixer):
        return KeyedPromptBlock(block, block.mixer, dtype)
    if isinstance(block.mixer, WindowAttention):
        return WindowPromptBlock(block, block.mixer, dtype)
    return block


def _eps(norm: nn.RMSNorm) -> float:
    return torch.finfo(torch.float32).eps if norm.eps is None else norm.eps
