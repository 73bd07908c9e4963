"""Boundaries of a text, at which slots change in a way that no chunk of tokens can express."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from nsm_core.model.segments import Segments
from nsm_core.ops.slot_scan.chunked import CHUNK_LEN


def may_be_any(rows: Tensor) -> bool:
    """Whether any of rows [B] bool may be set; True without waiting on a GPU, and in an exported graph."""
    return rows.is_cuda or torch.compiler.is_exporting() or bool(rows.any())


class Piece(NamedTuple):
    """Some tokens of a batch, with at most one boundary in each row.

    `tokens`: which. `segments`: of them alone. `before` [B,T] bool: up to the row's boundary, or all of a row without
    one. `has_boundary` [B] bool.
    """

    tokens: slice
    segments: Segments
    before: Tensor
    has_boundary: Tensor

    @property
    def may_have_boundary(self) -> bool:
        """See `may_be_any`."""
        return may_be_any(self.has_boundary)

    def starts(self, mask: Tensor) -> Tensor | None:
        """[B, T/CHUNK_LEN] bool: texts that start at a token of the mask [B,T]; None where none starts."""
        reset = self.segments.reset
        return None if reset is None else reset & mask[:, ::CHUNK_LEN]


class Stretches(NamedTuple):
    """The first n * interval tokens of a batch as [B, n] stretches of `interval` tokens with at most one boundary each.

    `before` [B,n,interval] bool: up to the stretch's boundary, or all of one without. `has_boundary` [B,n] bool.
    `reset` [B, n, interval/CHUNK_LEN] bool: texts that start there; None: none do.
    """

    before: Tensor
    has_boundary: Tensor
    reset: Tensor | None

    def halves(self) -> Iterator[tuple[Tensor, Tensor | None]]:
        """(mask, resets in it) of the tokens before and after the boundaries, the stretches as rows [B n, interval]."""
        for mask in (self.before, ~self.before):
            own = mask.flatten(0, 1)
            yield own, None if self.reset is None else self.reset.flatten(0, 1) & own[:, ::CHUNK_LEN]


def stretches(segments: Segments, interval: int, count: int) -> Stretches:
    """The first `count` stretches. Boundaries come after every `interval` tokens of a text."""
    num_tokens = count * interval
    positions = torch.unflatten(segments.positions[:, :num_tokens], 1, (count, interval))
    is_boundary = (positions + 1) % interval == 0
    if segments.lengths is not None:
        index = torch.arange(num_tokens, device=positions.device).view(count, interval)
        is_boundary = is_boundary & (index < segments.lengths[:, None, None])
    has_boundary = is_boundary.any(dim=2)
    first = torch.where(has_boundary, is_boundary.int().argmax(dim=2), interval)
    before = torch.arange(interval, device=positions.device) <= first[..., None]
    reset = segments.reset
    if reset is not None:
        reset = torch.unflatten(reset[:, : num_tokens // CHUNK_LEN], 1, (count, interval // CHUNK_LEN))
    return Stretches(before, has_boundary, reset)


def pieces(segments: Segments, interval: int, first: int = 0) -> Iterator[Piece]:
    """Tokens in order, from `first` on. Boundaries come after every `interval` tokens of a text, wherever the batch
    begins.
    """
    num_tokens = segments.positions.shape[1]
    for start in range(first, num_tokens, interval):
        yield _piece(segments, start, min(interval, num_tokens - start), interval)


def _piece(segments: Segments, start: int, num_tokens: int, interval: int) -> Piece:
    tokens = slice(start, start + num_tokens)
    index = torch.arange(num_tokens, device=segments.positions.device)
    chunks = slice(start // CHUNK_LEN, (start + num_tokens) // CHUNK_LEN)
    own = segments._replace(
        positions=segments.positions[:, tokens],
        lengths=None if segments.lengths is None else segments.lengths - start,
        valid=None if segments.valid is None else segments.valid[:, tokens],
        reset=None if segments.reset is None else segments.reset[:, chunks],
    )
    is_boundary = (own.positions + 1) % interval == 0
    if own.lengths is not None:
        is_boundary = is_boundary & (index < own.lengths[:, None])
    has_boundary = is_boundary.any(dim=1)
    before = torch.where(has_boundary, is_boundary.int().argmax(dim=1), num_tokens)[:, None] >= index
    return Piece(tokens, own, before, has_boundary)
