"""What a text does to the matrices of an RWKV-7 model: their length after it, and how long they keep what was written.

The plain model reads the text with a scan that notes the decays, so every figure is of the computation itself.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from nsm_core.rwkv7.model import MATRIX, Rwkv7Model
from nsm_core.rwkv7.time_mix import state_scan
from nsm_core.state.spec import State

PIECE_LEN = 32  # tokens between two signs of progress


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MatrixUse:
    """One head of one layer.

    `norm`: Frobenius norm of the matrix after the text. `decay`: the share that a channel keeps of itself at a token,
    geometric mean over tokens and channels. `half_life`: tokens until decay alone leaves half of the median channel.
    What a token overwrites comes on top of decay.
    """

    norm: float
    decay: float
    half_life: float


class _DecayNotes:
    """A scan that adds up -log(w) of each layer; the layers come in turn."""

    def __init__(self, num_layers: int) -> None:
        self.totals: list[Tensor | None] = [None] * num_layers
        self._calls = 0

    def __call__(self, *, w: Tensor, **others: Tensor) -> tuple[Tensor, Tensor]:
        """w [1,T,H,K] in (0, 1]; all else as `state_scan` takes it."""
        layer = self._calls % len(self.totals)
        self._calls += 1
        before, lost = self.totals[layer], -w[0].log().sum(dim=0)
        self.totals[layer] = lost if before is None else before + lost
        return state_scan(w=w, **others)


@torch.inference_mode()
def matrix_uses(
    model: Rwkv7Model,
    ids: Sequence[int],
    state: State | None = None,
    *,
    progress: Callable[[int], None] = lambda num_read: None,
) -> tuple[tuple[MatrixUse, ...], ...]:
    """The heads of each layer after `ids` (at least one) on top of `state` [1, ...] (None: the start of a text)."""
    reader = Rwkv7Model(model.config, model.tensors, model.device, num_ids=model.num_ids)
    notes = _DecayNotes(model.config.num_layers)
    reader.scan = notes
    now = reader.initial_state(1) if state is None else state
    for start in range(0, len(ids), PIECE_LEN):
        piece = torch.tensor([ids[start : start + PIECE_LEN]], device=model.device)
        _, now = reader.forward(piece, now)
        progress(start + piece.shape[1])
    return tuple(
        tuple(map(_use, now[f"layers.{layer}.{MATRIX}"][0], lost / len(ids)))
        for layer, lost in enumerate(notes.totals)
        if lost is not None
    )


def _use(matrix: Tensor, rate: Tensor) -> MatrixUse:
    """matrix [K,V]; rate [K]: mean -log(w) of each channel."""
    return MatrixUse(
        norm=float(matrix.norm()),
        decay=math.exp(-float(rate.mean())),
        half_life=math.log(2) / max(float(rate.median()), torch.finfo(torch.float32).tiny),
    )
