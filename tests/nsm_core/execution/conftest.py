"""Without a GPU the kernels run in their compiler's interpreter: slow, but the same program."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported, which the kernels' modules do
