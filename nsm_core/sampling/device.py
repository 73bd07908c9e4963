"""Sampling on the device: only the chosen ids are copied to the host, and only `PendingTokens.wait` waits for them."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from nsm_core.sampling.masks import TokenMasks
from nsm_core.sampling.params import SamplingParams
from nsm_core.sampling.result import NOT_FINITE
from nsm_core.state.to_device import to_device

# The columns of a row's parameters, see `choose_tokens`; the third, its position, is set for each token
_PARAMS = struct.Struct("<QQQQddd")
NUM_COLUMNS = _PARAMS.size // 8
POSITION_COLUMN, _TEMPERATURE = 2, 4


class PackedRow(Protocol):
    """A row that is sampled on the device."""

    @property
    def position(self) -> int: ...

    @property
    def packed_params(self) -> bytes:
        """`pack_sampling_params` of its parameters."""
        ...


def pack_sampling_params(params: SamplingParams) -> bytes:
    """The kernel's parameters of a request; packed once for all its tokens."""
    temperature = params.temperature + 0.0  # -0.0 is greedy too; no bit of it may be set
    return _PARAMS.pack(
        params.seed, params.choice_index, 0, params.top_k, temperature, params.top_p, params.min_p
    )  # fmt: skip


class PendingTokens:
    """Ids that the device chooses: `ids` [B] int64 on the device, and a copy to the host under way."""

    def __init__(self, ids: Tensor, rounds: Tensor | None = None) -> None:
        """`rounds` [n, B or more] int64, contiguous: the ids of several rounds, of which `ids` are the last ones."""
        self.ids = ids
        self._is_copied: torch.cuda.Event | None = None
        given = ids[None] if rounds is None else rounds
        if ids.is_cuda:
            self._on_host = torch.empty(given.shape, dtype=given.dtype, pin_memory=True)
            self._on_host.copy_(given, non_blocking=True)
            self._is_copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._is_copied.record(torch.cuda.current_stream(ids.device))
        else:
            self._on_host = given.clone()

    def wait(self) -> npt.NDArray[np.int64]:
        """[n, B] ids, one round unless there are several: NOT_FINITE for a row that is not finite, SKIPPED for one that
        a round left out. Waits for the device, but not for later launches.
        """
        if self._is_copied is not None:
            self._is_copied.synchronize()
        ids: npt.NDArray[np.int64] = self._on_host.numpy()[:, : len(self.ids)]
        return ids


def has_draws(params: npt.NDArray[np.int64]) -> bool:
    """Whether a row of `pack_rows` is not greedy."""
    return bool(params[:, _TEMPERATURE].any())


def launch_on_device(logits: Tensor, params: npt.NDArray[np.int64], masks: TokenMasks | None = None) -> PendingTokens:
    """logits [B,V] fp32 on a GPU, for unadjusted rows; params: `pack_rows` of them. Does not wait.

    `masks`: of rows that may not have every token; their bits are copied, and the kernel applies them.

    The uniform draws have the host's bits. Weights are rounded differently: a token differs if the draw lies within
    rounding of the boundary between two tokens.
    """
    is_drawn = has_draws(params)  # else the kernel needs no parameters
    device = logits.device
    words = None if masks is None else to_device(masks.dense(*logits.shape), device)
    return PendingTokens(choose_on_device(logits, to_device(params, device) if is_drawn else None, words))


def choose_on_device(logits: Tensor, params: Tensor | None, words: Tensor | None = None) -> Tensor:
    """Ids [B] of logits [B,V] with parameters that are on the device: see `choose_tokens`. For any vocabulary."""
    from nsm_core.sampling.kernel import LARGEST_ROW, choose_tokens
    from nsm_core.sampling.large_kernel import choose_of_many

    choose = choose_tokens if logits.shape[-1] <= LARGEST_ROW else choose_of_many
    with torch.cuda.device_of(logits):  # type: ignore[no-untyped-call]
        return choose(logits, params, words)


def launch_samplers(vocab_size: int, device: torch.device) -> None:
    """Every kernel of `launch_on_device` once, on rows of zeros."""
    logits = torch.zeros(1, vocab_size, device=device)
    drawn = torch.zeros(1, NUM_COLUMNS, dtype=torch.int64, device=device)
    words = torch.ones(1, -(-vocab_size // 32), dtype=torch.int32, device=device)
    for params in (None, drawn):
        for masks in (None, words):
            choose_on_device(logits, params, masks)


def sample_on_device(logits: Tensor, rows: Sequence[PackedRow], masks: TokenMasks | None = None) -> list[int | None]:
    """`launch_on_device`, then waits for the ids; None for a row that is not finite."""
    (ids,) = launch_on_device(logits, pack_rows(rows), masks).wait().tolist()
    return [None if token_id == NOT_FINITE else token_id for token_id in ids]


def fits_device(logits: Tensor) -> bool:
    """Whether the kernel supports these logits."""
    from nsm_core.sampling.kernel import LARGEST_VOCABULARY

    return logits.dtype == torch.float32 and logits.stride(-1) == 1 and logits.shape[-1] <= LARGEST_VOCABULARY


def pack_rows(rows: Sequence[PackedRow]) -> npt.NDArray[np.int64]:
    """[B, 7]: `pack_sampling_params` of each row, with its position."""
    params = np.frombuffer(b"".join([row.packed_params for row in rows]), np.int64).reshape(len(rows), -1).copy()
    params[:, POSITION_COLUMN] = [row.position for row in rows]
    return params
