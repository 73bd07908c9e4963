"""The inputs of a slot scan, the same for all its implementations."""

from __future__ import annotations

import dataclasses

from torch import Tensor


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ScanInputs:
    """B rows of T tokens, H heads of width K, M slots a head; a slot is a key beside a value, 2K numbers.

    v, q, k [B,T,H,K]: values, queries and keys. log_decay [B,T,H,M] fp32 in [-5, 0]: a slot keeps exp(log_decay) of
    itself and takes the rest, 1 - exp(log_decay), from the token. scale [H]: of the read logits. state [B,H,M,2K] fp32.
    read_bias [B,T,H,M]: added to the scaled read logits. Without q and k it is the read logits, and `state` and
    `initial` are values alone, [B,H,M,K] and [H,M,K].
    reset [B, T/64] bool: before the first token of such a chunk the state becomes `initial` [H,M,2K].
    active [H,M] or [B,H,M] bool: other slots are neither written nor read; one at least must be active.
    cu_seqlens [S+1] int: the one row (B=1) holds S sequences end to end, token cu_seqlens[s] is the first of sequence
    s, and `state` is [S,H,M,2K]. Excludes `reset`.
    """

    v: Tensor
    log_decay: Tensor
    scale: Tensor
    state: Tensor
    q: Tensor | None = None
    k: Tensor | None = None
    reset: Tensor | None = None
    initial: Tensor | None = None
    read_bias: Tensor | None = None
    active: Tensor | None = None
    cu_seqlens: Tensor | None = None

    @property
    def tokens(self) -> dict[str, Tensor]:
        """The given tensors that have an entry for each token, by name."""
        optional = {"q": self.q, "k": self.k, "read_bias": self.read_bias}
        given = {name: value for name, value in optional.items() if value is not None}
        return {"v": self.v, "log_decay": self.log_decay, **given}
