"""The boundaries of texts in a batch of tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from nsm_core.ops.slot_scan.chunked import CHUNK_LEN


class Segments(NamedTuple):
    """The positions and boundaries of a batch's tokens, for layers.

    positions [B,T] int64: tokens before this one in its text. lengths [B]: right-padded rows, the rest of a row is
    padding. valid [B,T] bool: tokens that may touch the slots. reset [B, T/CHUNK_LEN] bool: a document starts at this
    chunk; its memory is the learned start. The last three are None for full rows that continue their states.
    `is_fresh`: no row continues a state, which spares full attention an empty cache. num_slots [B]: the first slots of
    a head that a row is read with, as if the others were not there; None: all.
    """

    positions: Tensor
    lengths: Tensor | None = None
    valid: Tensor | None = None
    reset: Tensor | None = None
    is_fresh: bool = False
    num_slots: Tensor | None = None

    def existing(self, num_slots: int) -> Tensor | None:
        """[B,1,M] bool: the existing slots of a layer; None: all."""
        if self.num_slots is None:
            return None
        return (torch.arange(num_slots, device=self.num_slots.device) < self.num_slots[:, None])[:, None]

    @property
    def end(self) -> Tensor:
        """[B] int64: the length of each row's text after its last token."""
        if self.lengths is None or self.reset is not None:
            return self.positions[:, -1] + 1
        return self.positions[:, 0] + self.lengths


def token_positions(start: Tensor, num_tokens: int, reset: Tensor | None) -> Tensor:
    """[B,T]: positions that continue from `start` [B], and restart at 0 at each chunk where a document starts."""
    offsets = torch.arange(num_tokens, device=start.device)
    continued = start[:, None] + offsets
    if reset is None:
        return continued
    chunk_starts = torch.arange(reset.shape[1], device=start.device) * CHUNK_LEN
    latest = torch.where(reset, chunk_starts, -1).cummax(dim=1).values.repeat_interleave(CHUNK_LEN, dim=1)
    return torch.where(latest < 0, continued, offsets - latest)


def documents_of(reset: Tensor) -> Tensor:
    """[B,T]: which document of its row a token belongs to; 0 is the one that the row's state comes from."""
    return reset.long().cumsum(dim=1).repeat_interleave(CHUNK_LEN, dim=1)


def valid_tokens(num_tokens: int, segments: Segments) -> Tensor | None:
    """[B,T]: tokens that are no padding; None: all."""
    if segments.valid is not None or segments.lengths is None:
        return segments.valid
    return torch.arange(num_tokens, device=segments.lengths.device) < segments.lengths[:, None]


def first_tokens(reset: Tensor) -> Tensor:
    """reset [B, T/CHUNK_LEN] -> [B,T]: the first token of a chunk at which a document starts."""
    starts = reset.new_zeros(*reset.shape, CHUNK_LEN)
    starts[..., 0] = reset
    return starts.flatten(1)
