"""An RWKV-7 model's tensors in files of any layout: sizes from shapes, every tensor checked before one is read."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from torch import Tensor

from nsm_core.errors import CheckpointError, ConfigError
from nsm_core.formats.int4_groups import PackedInt4
from nsm_core.formats.int8_rows import Int8Rows
from nsm_core.formats.stored_tensor import Shape, StoredTensor, shown_shape
from nsm_core.hashing import new_identity
from nsm_core.rwkv7.config import Rwkv7Config
from nsm_core.rwkv7.layouts import (
    OFFICIAL,
    OFFICIAL_TURNED,
    OFFSETS_SUFFIX,
    SCALE_SUFFIX,
    SHIFTS,
    STEPS_SUFFIX,
    Layout,
    Source,
)
from nsm_core.rwkv7.tensors import tensor_shapes

HEAD_SIZE = 64  # of all published models; needed where a file has the bonus of the heads in one row


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Hints:
    """What files say of a model beside its tensors; None where shapes, or the published models' habit, decide."""

    num_layers: int | None = None
    width: int | None = None
    head_size: int | None = None
    norm_eps: float = 1e-5
    head_norm_eps: float = 64e-5
    is_tied: bool = False  # the head's weights are the embedding's


class ModelTensors(Mapping[str, Tensor]):
    """The tensors by canonical name. Each look-up reads that tensor, and keeps nothing."""

    def __init__(self, path: Path, stored: Mapping[str, StoredTensor], layout: Layout, hints: Hints) -> None:
        """`path` names the model in messages. Raises CheckpointError that names file and tensor."""
        self.path, self._stored, self._hints = path, stored, hints
        self._layout = OFFICIAL_TURNED if layout is OFFICIAL and self._has_turned_matrices() else layout
        self.config = self._config()
        shapes = tensor_shapes(self.config)
        self.sources = {name: self._checked(name, shape) for name, shape in shapes.items()}
        self._refuse_unknown(shapes)

    def __getitem__(self, name: str) -> Tensor:
        return self.sources[name].read()

    def __iter__(self) -> Iterator[str]:
        return iter(self.sources)

    def __len__(self) -> int:
        return len(self.sources)

    def packed(self, name: str) -> PackedInt4 | None:
        """A matrix in int4 as the file has it; None for any other tensor. Raises CheckpointError."""
        return self.sources[name].packed()

    def rows(self, name: str) -> Int8Rows | None:
        """A matrix in int8 as the file has it; None for any other tensor. Raises CheckpointError."""
        return self.sources[name].rows()

    @property
    def weight_format(self) -> str:
        """The format of the large matrices, or the nearest one that executors know."""
        return self.sources["blocks.0.ffn.key.weight"].stored.kind.weight_format

    @property
    def kinds(self) -> dict[str, int]:
        """Bytes in the file by the kind of numbers, the most first."""
        totals: dict[str, int] = {}
        for name in {source.stored.name for source in self.sources.values()}:
            stored = self._stored[name]
            totals[stored.kind.name] = totals.get(stored.kind.name, 0) + stored.num_bytes
        return dict(sorted(totals.items(), key=lambda item: -item[1]))

    def fingerprint(self, *parts: str) -> str:
        """Identity of the model: config, numbers and `parts`. Files with equal numbers under equal names have one."""
        sources = list(self.sources.items())
        with concurrent.futures.ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1)) as pool:
            digests = list(pool.map(_digest, sources))
        return new_identity("rwkv7", json.dumps(dataclasses.asdict(self.config)), *parts, *digests).hexdigest()

    def _find(self, name: str) -> Source | None:
        fused = self._layout.fused_of(name)
        if fused is not None and fused[0] in self._stored:
            return Source(stored=self._stored[fused[0]], part=fused[1])
        stored = self._stored.get(self._layout.name_of(name))
        if stored is None and name == "head.weight" and self._hints.is_tied:
            return self._find("emb.weight")
        if stored is None:
            return None
        scale, steps, offsets = (
            self._stored.get(stored.name + suffix) for suffix in (SCALE_SUFFIX, STEPS_SUFFIX, OFFSETS_SUFFIX)
        )
        grids = None if steps is None or offsets is None or scale is None else (steps, offsets)
        return Source(stored=stored, is_turned=self._layout.is_turned(name), scale=scale, grids=grids)

    def _source(self, name: str) -> Source:
        source = self._find(name)
        if source is None:
            raise CheckpointError(f"{self.path}: the tensor {self._layout.name_of(name)} is missing")
        return source

    def _checked(self, name: str, shape: Shape) -> Source:
        source = self._source(name)
        stored = source.stored
        if (stored.kind.name == "U8") != (source.grids is not None):
            raise stored.error(
                "holds numbers of 4 bits without scale and grids for each row, or other numbers with them"
            )
        is_same = source.part is None or stored.count == len(SHIFTS) * shape[-1]
        given = source.shape
        if source.part is None and "r_k" in name and stored.count == shape[0] * shape[1]:
            given = shape  # heads in one row
        if not is_same or _without_ones(given) != _without_ones(shape):
            raise stored.error(f"has the shape {shown_shape(stored.shape)}, which does not fit {shown_shape(shape)}")
        is_scaled = source.scale is not None and source.grids is None
        if (stored.kind.name == "I8") != is_scaled:
            raise stored.error("holds int8 numbers without a scale for each row, or other numbers with one")
        if source.scale is not None and source.scale.shape != stored.shape[:1]:
            raise source.scale.error(f"has the shape {shown_shape(source.scale.shape)}, not {list(stored.shape[:1])}")
        return dataclasses.replace(source, canonical=shape)

    def _refuse_unknown(self, shapes: Mapping[str, Shape]) -> None:
        known = {source.stored.name for source in self.sources.values()} | self._layout.unused()
        known |= {other.name for source in self.sources.values() for other in source.others}
        known |= {self._layout.name_of(name) for name in shapes}  # a tied head may be stored all the same
        for name, stored in self._stored.items():
            if name not in known:
                raise stored.error("is none of an RWKV-7 model: the file has more than can be computed here")

    def _config(self) -> Rwkv7Config:
        vocab_size, width = self._matrix("emb.weight")
        num_layers = self._layout.num_layers(self._stored)
        for label, given, found in (
            ("layers", self._hints.num_layers, num_layers),
            ("numbers in a row of the embedding", self._hints.width, width),
        ):
            if given is not None and given != found:
                raise CheckpointError(f"{self.path}: there are {found} {label}, and its configuration says {given}")
        bonus = self._source("blocks.0.att.r_k").shape
        try:
            return Rwkv7Config(
                vocab_size=vocab_size,
                width=width,
                num_layers=num_layers,
                head_size=bonus[1] if len(bonus) == 2 else self._hints.head_size or HEAD_SIZE,
                decay_rank=self._rank("blocks.0.att.w1"),
                rate_rank=self._rank("blocks.0.att.a1"),
                value_rank=self._rank("blocks.1.att.v1") if num_layers > 1 else 0,
                gate_rank=self._rank("blocks.0.att.g1"),
                hidden=self._matrix("blocks.0.ffn.key.weight")[0],
                norm_eps=self._hints.norm_eps,
                head_norm_eps=self._hints.head_norm_eps,
            )
        except ConfigError as error:
            raise CheckpointError(f"{self.path}: {error}") from error

    def _matrix(self, name: str) -> Shape:
        source = self._source(name)
        if len(source.shape) != 2:
            raise source.stored.error(f"has the shape {shown_shape(source.stored.shape)}, and must be a matrix")
        return source.shape

    def _rank(self, name: str) -> int:
        return self._matrix(name)[1]

    def _has_turned_matrices(self) -> bool:
        embedding, small = self._stored.get("emb.weight"), self._stored.get("blocks.0.att.w1")
        if embedding is None or small is None or len(embedding.shape) != 2 or len(small.shape) < 2:
            return False
        width = embedding.shape[1]
        return small.shape[-2] != width == small.shape[-1]


def _digest(item: tuple[str, Source]) -> str:
    name, source = item
    digest = new_identity(name, source.manner, source.stored.kind.name)
    for stored in (source.stored, *source.others):
        for chunk in stored.chunks():
            digest.update(chunk)
    return digest.hexdigest()


def _without_ones(shape: Shape) -> Shape:
    return tuple(size for size in shape if size != 1)
