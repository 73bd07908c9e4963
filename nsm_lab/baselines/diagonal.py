"""Linear time-invariant state spaces with a diagonal matrix.

S4D (Gu et al. 2022, arXiv 2206.11893) and S5 (Smith et al. 2023, arXiv 2208.04933).
"""

from __future__ import annotations

import abc
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nsm_core.config import ModelConfig
from nsm_core.errors import ConfigError
from nsm_core.model.segments import Segments, first_tokens, valid_tokens
from nsm_core.ops.chunks import in_chunks
from nsm_core.ops.linear_scan import linear_scan
from nsm_core.ops.slot_scan.chunked import CHUNK_LEN
from nsm_core.state.spec import State
from nsm_lab.baselines.baseline import Baseline, linear, silenced, zero_linear

STEP_RANGE = (0.001, 0.1)  # of the discretisation at the start


class DiagonalSsm(Baseline):
    """x' = A x + B u, y = 2 Re(C x) + D u, discretised by a step of its own (zero-order hold); then GELU and a gated
    linear unit, as both papers have it. Eigenvalues come in conjugate pairs, of which one is kept.

    `dynamics`: the logarithms of minus the real parts of all eigenvalues, then the imaginary parts; flat, because
    stored vectors keep their fp32 in every format of weights, and a phase adds up over the text. State: `modes`
    [..., 2], real and imaginary parts.
    """

    def __init__(self, config: ModelConfig, eigenvalues: Tensor) -> None:
        super().__init__()
        d = config.d_model
        self.modes_shape = tuple(eigenvalues.shape)
        self.dynamics = nn.Parameter(torch.stack(((-eigenvalues.real).log(), eigenvalues.imag)).float().flatten())
        low, high = (math.log(bound) for bound in STEP_RANGE)
        self.log_step = nn.Parameter(torch.linspace(low, high, eigenvalues.shape[0]))
        self.skip = nn.Parameter(torch.ones(d))
        self.out = zero_linear(d, 2 * d)

    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        return {"modes": (*self.modes_shape, 2)}

    def eigenvalues(self, dtype: torch.dtype) -> Tensor:
        """A, complex of the shape of the modes; `dtype` of its parts."""
        log_damping, frequency = self.dynamics.to(dtype).view(2, *self.modes_shape).unbind(0)
        return torch.complex(-log_damping.exp(), frequency)

    def _discretised(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Complex, of the shape of the modes: A * step, and (exp(A * step) - 1) / A, which goes with B."""
        eigenvalue = self.eigenvalues(dtype)
        step = self.log_step.to(dtype).exp()
        exponent = eigenvalue * step.view(-1, *[1] * (eigenvalue.dim() - 1))
        return exponent, (exponent.exp() - 1.0) / eigenvalue

    @abc.abstractmethod
    def _ssm(self, u: Tensor, modes: Tensor, segments: Segments) -> tuple[Tensor, Tensor]:
        """u [B,T,d], modes [B,...,2] -> 2 Re(C x) [B,T,d] and the modes after each row's last token."""

    def forward(self, x: Tensor, state: State, segments: Segments) -> tuple[Tensor, State]:
        modes = state["modes"]
        with torch.autocast(x.device.type, enabled=False):
            u = x.to(modes.dtype)
            y, end = self._ssm(u, modes, segments)
            y = F.gelu(y + self.skip * u)
        return F.glu(self.out(y.to(x.dtype)), dim=-1), {"modes": end}


class S4d(DiagonalSsm):
    """A state space of `num_memory_slots` complex modes for every channel: S4D-Lin, -1/2 + i pi n at the start.

    In chunks of tokens the convolution is a triangular product inside, and the modes are carried from chunk to chunk.
    """

    def __init__(self, config: ModelConfig) -> None:
        d, size = config.d_model, config.num_memory_slots
        lin = torch.complex(torch.full((size,), -0.5), math.pi * torch.arange(size, dtype=torch.float32))
        super().__init__(config, lin.expand(d, size))
        self.readout = nn.Parameter(torch.randn(d, size, 2) * 0.5**0.5)

    def _ssm(self, u: Tensor, modes: Tensor, segments: Segments) -> tuple[Tensor, Tensor]:
        num_tokens, chunk = u.shape[1], min(CHUNK_LEN, u.shape[1])
        exponent, inflow = self._discretised(u.dtype)  # [d,N]
        valid = valid_tokens(num_tokens, segments)
        placed = in_chunks(silenced(valid, u)[0], chunk)  # [B,n,C,d]
        counts = _chunk_counts(u, valid, chunk)  # [B,n]
        index = torch.arange(chunk, device=u.device)
        powers = (exponent[..., None] * index).exp()  # [d,N,C]
        read = torch.view_as_complex(self.readout.to(u.dtype))
        kernel = 2.0 * ((read * inflow)[..., None] * powers).real.sum(dim=1)  # [d,C]
        lag = index[:, None] - index
        toeplitz = torch.where(lag >= 0, kernel[:, lag.clamp(min=0)], 0.0)  # [d,C,C]
        inside = torch.einsum("dij,bnjd->bnid", toeplitz, placed)
        before, last = self._carry(placed, counts, exponent, inflow, modes, segments)
        weights = 2.0 * read[..., None] * (exponent[..., None] * (index + 1)).exp()
        outside = torch.einsum("dmc,bndm->bncd", torch.cat((weights.real, -weights.imag), dim=1), _parts(before))
        return (inside + outside).flatten(1, 2)[:, :num_tokens], torch.view_as_real(last)

    def _carry(
        self, placed: Tensor, counts: Tensor, exponent: Tensor, inflow: Tensor, modes: Tensor, segments: Segments
    ) -> tuple[Tensor, Tensor]:
        """Complex modes before every chunk [B,n,d,N], and after the last token [B,d,N]."""
        chunk = placed.shape[2]
        # tokens moved to the end of their chunk: what came last decayed least, however many there are
        source = torch.arange(chunk, device=placed.device) - (chunk - counts[..., None])
        late = torch.take_along_dim(placed, source.clamp(min=0)[..., None], dim=2) * (source >= 0)[..., None]
        weights = inflow[..., None] * (exponent[..., None] * torch.arange(chunk - 1, -1, -1, device=late.device)).exp()
        moved = torch.einsum("dmc,bncd->bndm", torch.cat((weights.real, weights.imag), dim=1), late)
        update = torch.complex(*moved.chunk(2, dim=-1))
        decay = (exponent * counts[..., None, None]).exp()
        if segments.reset is not None:
            decay = torch.where(segments.reset[..., None, None], 0.0, decay)
        start = torch.view_as_complex(modes.contiguous())
        after = torch.unflatten(linear_scan(decay.flatten(2), update.flatten(2), start.flatten(1)), 2, update.shape[2:])
        before = torch.cat((start[:, None], after[:, :-1]), dim=1)
        if segments.reset is not None:
            before = torch.where(segments.reset[..., None, None], 0.0, before)
        return before, after[:, -1]


class S5(DiagonalSsm):
    """One state space with d inputs and d outputs and d / 2 complex modes; all tokens at once by a scan.

    Its eigenvalues are those of the normal part of HiPPO-LegS at the start.
    """

    def __init__(self, config: ModelConfig) -> None:
        if config.d_model % 2:
            raise ConfigError(f"d_model must be even for S5, got {config.d_model}")
        d, size = config.d_model, config.d_model // 2
        eigenvalues, vectors = hippo_normal(2 * size)
        super().__init__(config, eigenvalues)
        self.project = linear(d, 2 * size)
        self.readout = linear(2 * size, d)
        inward_weight, outward_weight = torch.randn(2 * size, d, device="cpu"), torch.randn(d, 2 * size, device="cpu")
        inward = vectors.conj().T @ inward_weight.to(vectors.dtype) * d**-0.5
        outward = outward_weight.to(vectors.dtype) @ vectors * (2 * size) ** -0.5
        with torch.no_grad():
            self.project.weight.copy_(torch.cat((inward.real, inward.imag)))
            self.readout.weight.copy_(2.0 * torch.cat((outward.real, -outward.imag), dim=1))

    def _ssm(self, u: Tensor, modes: Tensor, segments: Segments) -> tuple[Tensor, Tensor]:
        exponent, inflow = self._discretised(u.dtype)  # [P]
        (inputs,) = silenced(valid_tokens(u.shape[1], segments), F.linear(u, self.project.weight.to(u.dtype)))
        update = torch.complex(*inputs.chunk(2, dim=-1)) * inflow
        decay = exponent.exp().expand_as(update)
        valid = valid_tokens(u.shape[1], segments)
        if valid is not None:
            decay = torch.where(valid[..., None], decay, 1.0)
        if segments.reset is not None:
            decay = torch.where(first_tokens(segments.reset)[..., None], 0.0, decay)
        scanned = linear_scan(decay, update, torch.view_as_complex(modes.contiguous()))
        read = F.linear(_parts(scanned), self.readout.weight.to(u.dtype))
        return read, torch.view_as_real(scanned[:, -1])


def hippo_normal(size: int) -> tuple[Tensor, Tensor]:
    """Eigenvalues [size / 2] of the normal part of HiPPO-LegS with positive imaginary part, and their vectors
    [size, size / 2].
    """
    order = torch.arange(size, dtype=torch.float64, device="cpu")
    scale = (2.0 * order + 1.0).sqrt()
    skew = -0.5 * scale[:, None] * scale
    skew = skew.tril(-1) - skew.tril(-1).T  # the matrix is -1/2 + skew: half of what LegS has below its diagonal
    frequencies, vectors = torch.linalg.eigh(-1j * skew.to(torch.complex128))
    is_positive = frequencies > 0
    eigenvalues = torch.complex(
        torch.full((size // 2,), -0.5, dtype=torch.float64, device="cpu"), frequencies[is_positive]
    )
    return eigenvalues, vectors[:, is_positive].to(torch.complex64)


def _parts(x: Tensor) -> Tensor:
    """Complex [...,N] -> real and imaginary parts side by side [...,2N]."""
    return torch.cat((x.real, x.imag), dim=-1)


def _chunk_counts(u: Tensor, valid: Tensor | None, chunk: int) -> Tensor:
    """[B,n]: tokens in each chunk; padding comes behind them."""
    if valid is None:
        valid = torch.ones(u.shape[:2], dtype=torch.bool, device=u.device)
    return in_chunks(valid, chunk).sum(dim=-1)
