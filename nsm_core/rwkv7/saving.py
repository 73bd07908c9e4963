"""Writes an RWKV-7 model in this project's own form: `config.json`, `weights.safetensors` and the tokenizer's file.

Tensors are read and written one by one. In int8 the large matrices are rounded, with a scale for each row; the others
stay as they are, but for an embedding in fp32, of which only rows are read: it becomes bf16.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from nsm_core.config import canonical_json
from nsm_core.errors import CheckpointError
from nsm_core.formats.int8_rows import quantize_rows
from nsm_core.formats.safetensors_file import Planned, write_safetensors
from nsm_core.rwkv7.finding import ARCHITECTURE, CONFIG_FILE, WEIGHTS_FILE
from nsm_core.rwkv7.layouts import SCALE_SUFFIX
from nsm_core.rwkv7.opening import OpenModel

INT8 = "int8"
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
FORMATS = (*DTYPES, INT8)
LARGE = ("receptance.weight", "key.weight", "value.weight", "output.weight", "head.weight")
EMBEDDING = "emb.weight"


def save_model(model: OpenModel, directory: Path, weight_format: str, *, chat_template: str) -> None:
    """Writes the files; each appears whole or not at all. `weight_format`: one of FORMATS.

    Raises CheckpointError that names a tensor whose numbers do not fit into the format.
    """
    directory.mkdir(parents=True, exist_ok=True)
    tensors = _Encoded(model, weight_format)
    write_safetensors(directory / WEIGHTS_FILE, tensors.planned(), tensors.read, metadata={"format": weight_format})
    fields = dataclasses.asdict(model.tensors.config) | {"architecture": ARCHITECTURE, "chat_template": chat_template}
    tokenizer = model.tokenizer()
    tokenizer.save(directory / tokenizer.file_name)
    (directory / CONFIG_FILE).write_text(canonical_json(fields), "utf-8")


class _Encoded:
    """The model's tensors as they are written."""

    def __init__(self, model: OpenModel, weight_format: str) -> None:
        self._model, self._format = model, weight_format
        self._quantized = functools.lru_cache(maxsize=1)(self._quantize)  # numbers, then the scale of the same tensor

    def planned(self) -> Iterator[Planned]:
        for name, source in self._model.tensors.sources.items():
            shape = source.canonical or source.shape
            if self._is_rounded(name):
                yield name, torch.int8, shape
                yield name + SCALE_SUFFIX, torch.float32, shape[:1]
            else:
                yield name, self._dtype(name), shape

    def read(self, name: str) -> Tensor:
        plain = name.removesuffix(SCALE_SUFFIX)
        if self._is_rounded(plain):
            return self._quantized(plain)[name != plain]
        value = self._model.tensors[name]
        stored = value.to(self._dtype(name))
        if bool(value.isfinite().all()) and not bool(stored.isfinite().all()):
            raise CheckpointError(f"{self._model.path}: the tensor {name} holds numbers that {stored.dtype} cannot")
        return stored

    def _quantize(self, name: str) -> tuple[Tensor, Tensor]:
        return quantize_rows(self._model.tensors[name])

    def _is_rounded(self, name: str) -> bool:
        return self._format == INT8 and name.endswith(LARGE)

    def _dtype(self, name: str) -> torch.dtype:
        """Vectors stay fp32: they are few numbers, and sums run over them."""
        source = self._model.tensors.sources[name]
        is_matrix = len(source.shape) == 2 and not name.endswith("r_k")
        if not is_matrix:
            return torch.float32
        if self._format != INT8:
            return DTYPES[self._format]
        stored = source.stored.kind.dtype
        if stored in (torch.float16, torch.bfloat16):
            return stored
        return torch.bfloat16 if name == EMBEDDING else torch.float32
