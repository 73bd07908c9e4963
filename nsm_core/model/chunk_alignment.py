"""Aligns the tokens of a call with chunks of their texts, for layers that update at chunk boundaries."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from nsm_core.model.segments import Segments


class ChunkAlignment(NamedTuple):
    """Columns for the tokens of a call: `num_chunks` (n) chunks of C columns, from a boundary of each text on.

    offset [B]: tokens of the row's first chunk that earlier calls read; end [B]: columns up to the row's last token.
    source [B, n * C]: the token of the call in each column; is_token [B, n * C]: whether the column has one.
    """

    num_chunks: int
    offset: Tensor
    end: Tensor
    source: Tensor
    is_token: Tensor

    def to_chunks(self, x: Tensor) -> Tensor:
        """x [B,T,...] -> [B, n * C, ...], zero in columns without a token."""
        index = self.source.clamp(0, x.shape[1] - 1)
        trailing = x.shape[2:]
        shape = (*index.shape, *[1] * len(trailing))
        chunked = torch.take_along_dim(x, index.view(shape), dim=1)
        return torch.where(self.is_token.view(shape), chunked, 0.0)

    def from_chunks(self, x: Tensor, num_tokens: int) -> Tensor:
        """The inverse of `to_chunks`: x [B, n * C, H, K] -> [B,T,H,K]."""
        index = self.offset[:, None] + torch.arange(num_tokens, device=x.device)
        return torch.take_along_dim(x, index[..., None, None], dim=1)


def align_chunks(num_tokens: int, chunk: int, segments: Segments) -> ChunkAlignment:
    """Boundaries are at multiples of `chunk` tokens in each row's text.

    A row with a text that starts within the call (`reset`) begins at a boundary, and the text starts at one.
    """
    start = segments.positions[:, 0]
    offset = start % chunk if segments.reset is None else torch.zeros_like(start)
    num_chunks = -(-(num_tokens + (chunk - 1 if segments.reset is None else 0)) // chunk)
    column = torch.arange(num_chunks * chunk, device=start.device)
    source = column - offset[:, None]
    lengths = num_tokens if segments.lengths is None else segments.lengths[:, None]
    is_token = (source >= 0) & (source < lengths)
    end = offset + (num_tokens if segments.lengths is None else segments.lengths)
    return ChunkAlignment(num_chunks, offset, end, source, is_token)


def open_chunk(x: Tensor, index: Tensor) -> Tensor:
    """x [B,n,...] at the chunk `index` [B] in which a row's text ends; zero if that is past the last chunk."""
    num_chunks, trailing = x.shape[1], [1] * (x.dim() - 2)
    last = torch.take_along_dim(x, index.clamp(max=num_chunks - 1).view(-1, 1, *trailing), dim=1)[:, 0]
    return torch.where((index < num_chunks).view(-1, *trailing), last, 0.0)
