"""Numbers as a small picture, one pixel each, inside of a page."""

from __future__ import annotations

import base64
import io

import numpy as np
from matplotlib.image import imsave
from torch import Tensor

COLOURS = "viridis"  # rises evenly in lightness, so that the order is seen without colour vision too


def heatmap_png(values: Tensor) -> bytes:
    """values [rows, columns], none negative, NaN as 0 -> a PNG in which the largest value is the brightest."""
    numbers = np.nan_to_num(values.double().numpy(), nan=0.0, posinf=0.0, neginf=0.0)
    picture = io.BytesIO()
    imsave(picture, numbers, format="png", cmap=COLOURS, vmin=0.0, vmax=float(numbers.max(initial=0.0)) or 1.0)
    return picture.getvalue()


def data_uri(png: bytes) -> str:
    """For the `src` of an image."""
    return "data:image/png;base64," + base64.b64encode(png).decode("ascii")
