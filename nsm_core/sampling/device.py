"""Sampling where the logits are: only the chosen ids come to the host, when somebody waits for them."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from nsm_core.sampling.params import SamplingParams
from nsm_core.sampling.result import NOT_FINITE

# The columns of a row's wishes, see `choose_tokens`; the third, its position, is filled in for each token
_WISHES = struct.Struct("<QQQQddd")
_POSITION, _TEMPERATURE = 2, 4


class Drawn(Protocol):
    """What a draw needs of a row."""

    @property
    def position(self) -> int: ...

    @property
    def wishes(self) -> bytes:
        """`pack_wishes` of its params."""
        ...


def pack_wishes(params: SamplingParams) -> bytes:
    """What the kernel must know of a request; made once for all of its tokens."""
    temperature = params.temperature + 0.0  # -0.0 is greedy as well, and must have no bit set
    return _WISHES.pack(
        params.seed, params.choice_index, 0, params.top_k, temperature, params.top_p, params.min_p
    )  # fmt: skip


class LaunchedTokens:
    """Ids that the device chooses, [B] int64 in `ids` there, on their way to the host."""

    def __init__(self, ids: Tensor) -> None:
        self.ids = ids
        self._is_copied: torch.cuda.Event | None = None
        self._on_host = ids
        if ids.is_cuda:
            self._on_host = torch.empty(ids.shape, dtype=ids.dtype, pin_memory=True)
            self._on_host.copy_(ids, non_blocking=True)
            self._is_copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._is_copied.record(torch.cuda.current_stream(ids.device))

    def wait(self) -> list[int]:
        """B ids, NOT_FINITE for a row that is not finite; waits for the device, and for nothing launched later."""
        if self._is_copied is not None:
            self._is_copied.synchronize()
        ids: list[int] = self._on_host.tolist()
        return ids


def launch_on_device(logits: Tensor, rows: Sequence[Drawn]) -> LaunchedTokens:
    """logits [B,V] fp32 on a GPU, for rows that need no adjustment. Waits for nothing.

    The draws are those of the host to the bit. Weights are sums of other roundings: a token differs where the draw
    lies within rounding of the border between two.
    """
    from nsm_core.sampling.kernel import choose_tokens

    wishes = _wishes(rows)
    with torch.cuda.device_of(logits):  # type: ignore[no-untyped-call]
        return LaunchedTokens(choose_tokens(logits, None if wishes is None else to_device(wishes, logits.device)))


def sample_on_device(logits: Tensor, rows: Sequence[Drawn]) -> list[int | None]:
    """`launch_on_device`, and the one wait for the device in a step; None for a row that is not finite."""
    return [None if token_id == NOT_FINITE else token_id for token_id in launch_on_device(logits, rows).wait()]


def fits_device(logits: Tensor) -> bool:
    """Whether the kernel takes logits of this kind."""
    from nsm_core.sampling.kernel import LARGEST_VOCABULARY

    return logits.dtype == torch.float32 and logits.stride(-1) == 1 and logits.shape[-1] <= LARGEST_VOCABULARY


def to_device(values: npt.NDArray[Any] | Tensor, device: torch.device) -> Tensor:
    """A copy there, in the order of what is launched; a GPU is not waited for, as it is for memory that may move."""
    tensor = torch.from_numpy(values) if isinstance(values, np.ndarray) else values
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def _wishes(rows: Sequence[Drawn]) -> npt.NDArray[np.int64] | None:
    """See `choose_tokens`."""
    packed = np.frombuffer(b"".join([row.wishes for row in rows]), np.int64).reshape(len(rows), -1)
    if not packed[:, _TEMPERATURE].any():
        return None
    wishes = packed.copy()
    wishes[:, _POSITION] = [row.position for row in rows]
    return wishes
