"""The LSTM (Hochreiter and Schmidhuber 1997; with a forget gate, Gers et al. 2000) as a layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from nsm_core.config import ModelConfig
from nsm_core.model.segments import Segments, valid_tokens
from nsm_core.ops.slot_scan.chunked import CHUNK_LEN
from nsm_core.state.spec import State
from nsm_lab.baselines.baseline import Baseline, linear, zero_linear

CLOSED = 1e4  # a gate this far from zero is shut, or open, to the last bit


class Lstm(Baseline):
    """i, f, o = sigmoid(.), c <- f c + i tanh(.), h = o tanh(c), with torch's own kernels. State: `hidden`, `cell` [d].

    One token after the other, whatever the device: no form of it is parallel. Padding is a feature of its own that
    shuts the input gate and opens the forget gate, so the cell keeps its bits.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        d = config.d_model
        self.project = linear(d, 4 * d)  # gates i, f, the candidate, o
        self.recurrent = linear(d, 4 * d)
        bias = torch.zeros(4 * d)
        bias[d : 2 * d] = 1.0  # remember at the start
        self.bias = nn.Parameter(bias)
        self.out = zero_linear(d, d)

    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        d = self.out.weight.shape[0]
        return {"hidden": (d,), "cell": (d,)}

    def forward(self, x: Tensor, state: State, segments: Segments) -> tuple[Tensor, State]:
        hidden, cell = state["hidden"], state["cell"]
        tokens = x.to(cell.dtype)
        valid = valid_tokens(x.shape[1], segments)
        weights = self._weights(valid is not None)
        if valid is not None:
            tokens = torch.cat((tokens, (~valid)[..., None].to(tokens.dtype)), dim=-1)
        read, span = [], x.shape[1] if segments.reset is None else CHUNK_LEN
        with torch.autocast(x.device.type, enabled=False):
            for index, part in enumerate(torch.split(tokens, span, dim=1)):
                if segments.reset is not None:
                    starts = segments.reset[:, index, None]
                    hidden, cell = torch.where(starts, 0.0, hidden), torch.where(starts, 0.0, cell)
                out, new_hidden, new_cell = _lstm(part, hidden, cell, weights)
                read.append(out)
                if valid is not None:
                    counts = valid[:, index * span : index * span + part.shape[1]].sum(dim=1)
                    new_hidden = _at_end(out, counts, hidden)
                hidden, cell = new_hidden, new_cell
        joined = read[0] if len(read) == 1 else torch.cat(read, dim=1)
        return self.out(joined.to(x.dtype)), {"hidden": hidden, "cell": cell}

    def _weights(self, has_padding: bool) -> list[Tensor]:
        weight = self.project.weight
        if has_padding:
            gates = torch.tensor([-CLOSED, CLOSED, 0.0, 0.0], dtype=weight.dtype, device=weight.device)
            weight = torch.cat((weight, gates.repeat_interleave(weight.shape[1])[:, None]), dim=1)
        return [weight, self.recurrent.weight, self.bias, torch.zeros_like(self.bias)]


def _lstm(x: Tensor, hidden: Tensor, cell: Tensor, weights: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """x [B,T,D]; hidden, cell [B,d] -> outputs [B,T,d], the last of them and the cell."""
    start = (hidden[None].contiguous(), cell[None].contiguous())
    # cuDNN goes backward in training mode only
    out, last, end = torch.lstm(x, start, weights, True, 1, 0.0, torch.is_grad_enabled(), False, True)
    return out, last[0], end[0]


def _at_end(out: Tensor, counts: Tensor, hidden: Tensor) -> Tensor:
    """The output of each row's last token that is no padding; padding comes behind the tokens of a chunk."""
    last = torch.take_along_dim(out, (counts - 1).clamp(min=0)[:, None, None], dim=1)[:, 0]
    return torch.where((counts > 0)[:, None], last, hidden)
