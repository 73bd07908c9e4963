"""What the layouts of RWKV-7 files call the tensors, and how they turn them.

Official files have the canonical names. Hugging Face's and GGUF's have the small matrices transposed, as weights of
linear layers, and may have the six token-shift vectors in one tensor.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping

from torch import Tensor

from nsm_core.formats.int4_groups import PackedInt4
from nsm_core.formats.int8_rows import Int8Rows
from nsm_core.formats.stored_tensor import Shape, StoredTensor

SHIFTS = "rwkvag"  # order of the token-shift vectors in one tensor
SCALE_SUFFIX, STEPS_SUFFIX, OFFSETS_SUFFIX = ".row_scale", ".int4_steps", ".int4_offsets"
# Of the first block, which has no value residual; some files have them, and no model reads them
UNUSED = frozenset(f"blocks.0.att.v{part}" for part in "012")

_SMALL = tuple(f"att.{letter}{part}" for letter in "wavg" for part in "12")
_NORMS = (("ln0", "pre_norm", ""), ("ln1", "attn_norm", "attn_norm"), ("ln2", "ffn_norm", "attn_norm_2"))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """`block` begins the names in a block, with {} for its number; `in_block` and `outside` have canonical names first.

    `turned`: names in a block of matrices that are stored transposed. `fused`: the name of all token-shift vectors.
    """

    block: str
    in_block: Mapping[str, str]
    outside: Mapping[str, str]
    turned: frozenset[str]
    fused: str

    def name_of(self, canonical: str) -> str:
        """The name in the file."""
        if canonical in self.outside:
            return self.outside[canonical]
        prefix, layer, rest = _split(canonical)
        return self.block.format(layer) + self.in_block.get(rest, rest) if prefix else canonical

    def is_turned(self, canonical: str) -> bool:
        return _split(canonical)[2] in self.turned

    def fused_of(self, canonical: str) -> tuple[str, int] | None:
        """The tensor that has all token-shift vectors, and which of them this is; None for any other tensor."""
        _, layer, rest = _split(canonical)
        if not (self.fused and rest.startswith("att.x_")):
            return None
        return self.block.format(layer) + self.fused, SHIFTS.index(rest[-1])

    def num_layers(self, names: Iterable[str]) -> int:
        """One more than the highest number of a block."""
        pattern = re.compile(re.escape(self.block).replace(r"\{\}", r"(\d{1,4})"))
        return max((int(match[1]) + 1 for name in names if (match := pattern.match(name))), default=0)

    def unused(self) -> frozenset[str]:
        return frozenset(map(self.name_of, UNUSED))


def _split(canonical: str) -> tuple[str, str, str]:
    """`blocks.7.att.w1` -> `blocks`, `7`, `att.w1`; of a name outside of blocks all are empty."""
    prefix, _, rest = canonical.partition(".")
    layer, _, rest = rest.partition(".")
    return (prefix, layer, rest) if prefix == "blocks" else ("", "", "")


def _parts(names: Mapping[str, str]) -> dict[str, str]:
    return {f"{name}.{part}": f"{other}.{part}" for name, other in names.items() for part in ("weight", "bias")}


OFFICIAL = Layout(block="blocks.{}.", in_block={}, outside={}, turned=frozenset(), fused="")
OFFICIAL_TURNED = dataclasses.replace(OFFICIAL, turned=frozenset(_SMALL))  # as ai00 and web-rwkv have them

HUGGING_FACE = Layout(
    block="model.layers.{}.",
    in_block={
        **_parts({name: other for name, other, _ in _NORMS} | {"att.ln_x": "attn.g_norm"}),
        **{f"att.x_{letter}": f"attn.x_{letter}" for letter in SHIFTS},
        **{f"att.{name}": f"attn.{name}" for name in ("k_k", "k_a", "r_k")},
        **{f"att.{name}.weight": f"attn.{name[0]}_proj.weight" for name in ("receptance", "key", "value", "output")},
        **{
            f"att.{letter}{part}": f"attn.{letter}_lora.lora.{other}"
            for letter in "wavg"
            for part, other in (("0", "2.bias"), ("1", "0.weight"), ("2", "2.weight"))
        },
    },
    outside={
        "emb.weight": "model.embeddings.weight",
        "head.weight": "lm_head.weight",
        **_parts({"ln_out": "model.norm"}),
    },
    turned=frozenset(_SMALL),
    fused="attn.x_x",
)

GGUF = Layout(
    block="blk.{}.",
    in_block={
        **_parts({name: other for name, _, other in _NORMS if other} | {"att.ln_x": "time_mix_ln"}),
        **{f"att.{name}": f"time_mix_{name}.weight" for name in ("k_k", "k_a", "r_k")},
        **{f"att.{letter}{part}": f"time_mix_{letter}{part}.weight" for letter in "wavg" for part in "012"},
        **{f"att.{name}.weight": f"time_mix_{name}.weight" for name in ("receptance", "key", "value", "output")},
        **{f"att.x_{letter}": "time_mix_lerp_fused.weight" for letter in SHIFTS},
        "ffn.x_k": "channel_mix_lerp_k.weight",
        "ffn.key.weight": "channel_mix_key.weight",
        "ffn.value.weight": "channel_mix_value.weight",
    },
    outside={
        "emb.weight": "token_embd.weight",
        "head.weight": "output.weight",
        **_parts({"ln_out": "output_norm", "blocks.0.ln0": "token_embd_norm"}),
    },
    turned=frozenset(_SMALL),
    fused="time_mix_lerp_fused.weight",
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """How a canonical tensor is stored: turned, as row `part` of six, or with a `scale` for each row.

    `grids`: steps and offsets of a matrix in int4, see PackedInt4. `canonical`: the shape to read it in; None until it
    is known.
    """

    stored: StoredTensor
    is_turned: bool = False
    part: int | None = None
    scale: StoredTensor | None = None
    grids: tuple[StoredTensor, StoredTensor] | None = None
    canonical: Shape | None = None

    @property
    def shape(self) -> Shape:
        """As it is read, without leading dimensions of size 1."""
        shape = self.stored.shape
        if self.part is not None:
            return (self.stored.count // len(SHIFTS),)
        while len(shape) > 1 and shape[0] == 1:
            shape = shape[1:]
        if self.grids is not None:
            shape = (*shape[:-1], 2 * shape[-1])
        return shape[::-1] if self.is_turned and len(shape) == 2 else shape

    def read(self) -> Tensor:
        """The canonical tensor: fp32, fp16 or bf16."""
        packed = self.packed()
        value = self.stored.read() if packed is None else packed.dense()
        if self.part is not None:
            value = value.reshape(len(SHIFTS), -1)[self.part]
        if self.scale is not None and packed is None:
            value = value.float() * self.scale.read().float()[:, None]
        if self.is_turned:
            value = value.reshape(self.shape[::-1]).t()
        value = value.float() if value.dtype.itemsize == 8 else value
        return value.reshape(self.shape if self.canonical is None else self.canonical).contiguous()

    def packed(self) -> PackedInt4 | None:
        """A matrix in int4 as the file has it; None for any other tensor. Raises CheckpointError that names it."""
        if self.grids is None or self.scale is None:
            return None
        packed = PackedInt4(self.stored.read(), *(part.read() for part in (*self.grids, self.scale)))
        fault = packed.fault()
        if fault is not None:
            raise self.stored.error(fault)
        return packed

    def rows(self) -> Int8Rows | None:
        """A matrix in int8 as the file has it; None for any other tensor."""
        if self.scale is None or self.grids is not None or self.is_turned or self.part is not None:
            return None
        return Int8Rows(self.stored.read().reshape(self.shape), self.scale.read().float())

    @property
    def others(self) -> tuple[StoredTensor, ...]:
        """What belongs to `stored`: scale and grids."""
        return tuple(part for part in (self.scale, *(self.grids or ())) if part is not None)

    @property
    def manner(self) -> str:
        """What sets the numbers apart from those of the same bytes stored plainly; empty for those."""
        return ("turned " if self.is_turned else "") + ("" if self.part is None else f"part {self.part}")
