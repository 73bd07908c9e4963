"""Blocks of quantised numbers, as GGUF files have them: [n, bytes of a block] uint8 -> [n, numbers of a block] fp32."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


def dequantise_q8_0(raw: Bytes) -> Floats:
    """An fp16 scale, then 32 int8."""
    return _halves(raw[:, :2]) * raw[:, 2:].view(np.int8).astype(np.float32)


def dequantise_q4_k(raw: Bytes) -> Floats:
    """8 groups of 32 numbers of 4 bits, each with 6 bits of scale and of offset; both in units of an fp16 number."""
    num_blocks = len(raw)
    scale, offset = _halves(raw[:, :2]), _halves(raw[:, 2:4])
    low, middle, high = np.split(raw[:, 4:16], 3, axis=1)
    scales = np.concatenate((low & 63, (high & 15) | (low >> 6 << 4)), axis=1)
    offsets = np.concatenate((middle & 63, (high >> 4) | (middle >> 6 << 4)), axis=1)
    # 32 bytes hold two groups: the first in their low halves
    packed = raw[:, 16:].reshape(num_blocks, 4, 1, 32)
    numbers = np.concatenate((packed & 15, packed >> 4), axis=2).reshape(num_blocks, 8, 32).astype(np.float32)
    steps, lows = scale * scales.astype(np.float32), offset * offsets.astype(np.float32)
    return (steps[:, :, None] * numbers - lows[:, :, None]).reshape(num_blocks, 256)


def dequantise_q6_k(raw: Bytes) -> Floats:
    """16 groups of 16 numbers: 4 low bits of each number, 2 high bits, an int8 for a group, an fp16 scale."""
    num_blocks = len(raw)
    low = raw[:, :128].reshape(num_blocks, 2, 1, 64)
    high = raw[:, 128:192].reshape(num_blocks, 2, 1, 32)
    scales: Floats = raw[:, 192:208].view(np.int8).astype(np.float32) * _halves(raw[:, 208:210])
    low_bits = np.concatenate((low & 15, low >> 4), axis=2).reshape(num_blocks, 2, 4, 32)
    high_bits = (high >> np.arange(0, 8, 2, dtype=np.uint8)[None, None, :, None]) & 3
    numbers: Floats = (low_bits | (high_bits << 4)).reshape(num_blocks, 16, 16).astype(np.float32) - 32.0
    scaled: Floats = scales[:, :, None] * numbers
    return scaled.reshape(num_blocks, 256)


def _halves(raw: Bytes) -> Floats:
    """[n, 2] bytes -> [n, 1]."""
    halves: npt.NDArray[np.float16] = np.ascontiguousarray(raw).view("<f2")
    return halves.astype(np.float32)
