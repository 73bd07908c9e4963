"""Writes an RWKV-7 model in this project's own form: `config.json`, `weights.safetensors` and the tokenizer's file.

Tensors are read and written one by one. In int8 the large matrices are rounded, with a scale for each row, and in int4
on a grid for each group of a row. The others stay as they are, but for an embedding in fp32, of which only rows are
read: it becomes bf16.
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
from nsm_core.formats.int4_groups import GROUP, is_packable, quantize_int4
from nsm_core.formats.int8_rows import quantize_rows
from nsm_core.formats.number_kinds import is_finite
from nsm_core.formats.safetensors_file import Planned, write_safetensors
from nsm_core.rwkv7.claims import ARCHITECTURE, CONFIG_FILE, WEIGHTS_FILE
from nsm_core.rwkv7.layouts import OFFSETS_SUFFIX, SCALE_SUFFIX, STEPS_SUFFIX
from nsm_core.rwkv7.opening import OpenModel

INT8, INT4 = "int8", "int4"
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
FORMATS = (*DTYPES, INT8, INT4)
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
        self._rounded = functools.lru_cache(maxsize=1)(self._round)  # several tensors come of one, one after another

    def planned(self) -> Iterator[Planned]:
        for name, source in self._model.tensors.sources.items():
            shape = source.canonical or source.shape
            if self._is_packed(name):
                groups = (shape[0], -(-shape[1] // GROUP))
                yield name, torch.uint8, (shape[0], shape[1] // 2)
                yield name + SCALE_SUFFIX, torch.float32, shape[:1]
                yield name + STEPS_SUFFIX, torch.uint8, groups
                yield name + OFFSETS_SUFFIX, torch.int8, groups
            elif self._is_rounded(name):
                yield name, torch.int8, shape
                yield name + SCALE_SUFFIX, torch.float32, shape[:1]
            else:
                yield name, self._dtype(name), shape

    def read(self, name: str) -> Tensor:
        plain = name.removesuffix(SCALE_SUFFIX).removesuffix(STEPS_SUFFIX).removesuffix(OFFSETS_SUFFIX)
        if self._is_rounded(plain):
            return self._rounded(plain)[name.removeprefix(plain)]
        value = self._model.tensors[name]
        stored = value.to(self._dtype(name))
        if is_finite(value) and not is_finite(stored):
            raise CheckpointError(f"{self._model.path}: the tensor {name} holds numbers that {stored.dtype} cannot")
        return stored

    def _round(self, name: str) -> dict[str, Tensor]:
        """What is written, by the ending of its name."""
        if self._is_packed(name):
            packed = self._model.tensors.packed(name) or quantize_int4(self._model.tensors[name]).packed()
            grids = {STEPS_SUFFIX: packed.steps, OFFSETS_SUFFIX: packed.offsets}
            return {"": packed.numbers, SCALE_SUFFIX: packed.scale, **grids}
        numbers, scale = quantize_rows(self._model.tensors[name])
        return {"": numbers, SCALE_SUFFIX: scale}

    def _is_rounded(self, name: str) -> bool:
        return self._format in (INT8, INT4) and name.endswith(LARGE)

    def _is_packed(self, name: str) -> bool:
        return self._format == INT4 and self._is_rounded(name) and is_packable(self._model.tensors.sources[name].shape)

    def _dtype(self, name: str) -> torch.dtype:
        """Vectors stay fp32: they are few numbers, and sums run over them."""
        source = self._model.tensors.sources[name]
        is_matrix = len(source.shape) == 2 and not name.endswith("r_k")
        if not is_matrix:
            return torch.float32
        if self._format in DTYPES:
            return DTYPES[self._format]
        stored = source.stored.kind.dtype
        if stored in (torch.float16, torch.bfloat16):
            return stored
        return torch.bfloat16 if name == EMBEDDING else torch.float32
