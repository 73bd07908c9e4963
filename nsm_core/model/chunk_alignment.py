"""Tokens of a call laid out from boundary to boundary of their texts, for layers that do something at boundaries."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from nsm_core.model.segments import Segments


class Frame(NamedTuple):
    """The tokens of a call in columns that begin at a boundary of every row's text: `num_chunks` chunks of C columns.

    offset [B]: tokens of the row's first chunk that were read before; end [B]: columns up to the row's last token.
    source [B, n * C]: which token of the call lies in a column; is_token: whether one does.
    """

    num_chunks: int
    offset: Tensor
    end: Tensor
    source: Tensor
    is_token: Tensor

    def place(self, x: Tensor) -> Tensor:
        """x [B,T,...] -> [B, n * C, ...], zero where there is no token of the call."""
        index = self.source.clamp(0, x.shape[1] - 1)
        trailing = x.shape[2:]
        shape = (*index.shape, *[1] * len(trailing))
        placed = torch.take_along_dim(x, index.view(shape), dim=1)
        return torch.where(self.is_token.view(shape), placed, 0.0)

    def take(self, x: Tensor, num_tokens: int) -> Tensor:
        """The inverse: x [B, n * C, H, K] -> [B,T,H,K]."""
        index = self.offset[:, None] + torch.arange(num_tokens, device=x.device)
        return torch.take_along_dim(x, index[..., None, None], dim=1)


def make_frame(num_tokens: int, chunk: int, segments: Segments) -> Frame:
    """The frame with boundaries at multiples of `chunk` in each row's text.

    Texts that start within the call (`reset`) must do so at boundaries, and such rows begin at one.
    """
    start = segments.positions[:, 0]
    offset = start % chunk if segments.reset is None else torch.zeros_like(start)
    num_chunks = -(-(num_tokens + (chunk - 1 if segments.reset is None else 0)) // chunk)
    column = torch.arange(num_chunks * chunk, device=start.device)
    source = column - offset[:, None]
    lengths = num_tokens if segments.lengths is None else segments.lengths[:, None]
    is_token = (source >= 0) & (source < lengths)
    end = offset + (num_tokens if segments.lengths is None else segments.lengths)
    return Frame(num_chunks, offset, end, source, is_token)


def open_chunk(x: Tensor, index: Tensor) -> Tensor:
    """x [B,n,...] at the chunk `index` [B] that a row's text ends in; zero where that is past the last chunk."""
    num_chunks, trailing = x.shape[1], [1] * (x.dim() - 2)
    taken = torch.take_along_dim(x, index.clamp(max=num_chunks - 1).view(-1, 1, *trailing), dim=1)[:, 0]
    return torch.where((index < num_chunks).view(-1, *trailing), taken, 0.0)
