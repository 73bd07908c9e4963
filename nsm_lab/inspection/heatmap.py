"""Numbers as a small picture: one pixel each, PNG, made here so that a page needs nothing else."""

from __future__ import annotations

import base64
import struct
import zlib

import numpy as np
from torch import Tensor

# From dark to bright in even steps of lightness, so that they order without colour vision too (after viridis)
_ANCHORS = ((68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (253, 231, 37))
_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def heatmap_png(values: Tensor, *, highest: float | None = None) -> bytes:
    """values [rows, columns], none negative, NaN as 0; `highest` gets the brightest colour, None: the largest does."""
    numbers = np.nan_to_num(values.double().numpy(), nan=0.0, posinf=0.0, neginf=0.0)
    top = float(numbers.max(initial=0.0)) if highest is None else highest
    levels = np.clip(numbers / (top or 1.0) * 255, 0, 255).astype(np.uint8)
    rows, columns = levels.shape
    lines = np.concatenate((np.zeros((rows, 1), np.uint8), levels), axis=1)  # each line begins with its filter: none
    header = struct.pack(">IIBBBBB", columns, rows, 8, 3, 0, 0, 0)  # 8 bits a pixel, colours from the palette
    parts = ((b"IHDR", header), (b"PLTE", _palette()), (b"IDAT", zlib.compress(lines.tobytes(), 9)), (b"IEND", b""))
    return _SIGNATURE + b"".join(_chunk(kind, data) for kind, data in parts)


def data_uri(png: bytes) -> str:
    """For the `src` of an image."""
    return "data:image/png;base64," + base64.b64encode(png).decode("ascii")


def _palette() -> bytes:
    places = np.linspace(0, len(_ANCHORS) - 1, 256)
    channels = [np.interp(places, range(len(_ANCHORS)), channel) for channel in zip(*_ANCHORS, strict=True)]
    return np.stack(channels, axis=1).round().astype(np.uint8).tobytes()


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
