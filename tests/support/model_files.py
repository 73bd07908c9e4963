"""Small model files of every format, with random numbers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

K_BLOCKS = {"Q4_K": (144, slice(0, 4)), "Q6_K": (210, slice(208, 210))}  # bytes, and where the fp16 scales are


def write_pth(path: Path, tensors: Mapping[str, Any]) -> Path:
    torch.save(dict(tensors), path)  # noqa: TID251  # as the official files are written
    return path


def write_safetensors(path: Path, tensors: Mapping[str, Tensor]) -> Path:
    save_file({name: value.contiguous() for name, value in tensors.items()}, path)
    return path


def write_gguf(
    path: Path,
    tensors: Mapping[str, Tensor],
    keys: Mapping[str, Any],
    *,
    kind: str = "F32",
    architecture: str = "rwkv7",
) -> Path:
    """Matrices as `kind`, vectors as F32. A list among the keys is one of texts."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in keys.items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, list: writer.add_array}
        add[type(value)](key, value)
    for name, value in tensors.items():
        is_matrix = value.ndim == 2 and value.shape[-1] % gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][0] == 0
        chosen = gguf.GGMLQuantizationType[kind if is_matrix else "F32"]
        writer.add_tensor(name, quantised(value.float().numpy(), chosen), raw_dtype=chosen)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def quantised(numbers: Any, kind: gguf.GGMLQuantizationType) -> Any:
    """`numbers` as blocks. The library writes none of the K kinds: those are random bits with small scales."""
    if kind.name not in K_BLOCKS:
        return gguf.quants.quantize(numbers, kind)
    num_bytes, scales = K_BLOCKS[kind.name]
    draw = np.random.default_rng(numbers.size)
    blocks = draw.integers(0, 256, (numbers.size // 256, num_bytes), dtype=np.uint8)
    sound = draw.uniform(1e-4, 1e-3, (len(blocks), (scales.stop - scales.start) // 2)).astype(np.float16)
    blocks[:, scales] = sound.view(np.uint8)
    return blocks.reshape(*numbers.shape[:-1], -1)
