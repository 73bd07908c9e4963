"""A model's weights in the layout of the native kernels: int8 or int4 matrices, fp16 router, everything else fp32."""

from __future__ import annotations

import ctypes
import math
import weakref
from collections.abc import Mapping

import torch
from torch import Tensor

from nsm_core.execution.native.library import (
    LANES,
    MAX_HEAD_DIM,
    MAX_SLOTS,
    Kind,
    Part,
    Shape,
    load_library,
    missing_reason,
    variants,
)
from nsm_core.execution.native.precision import Precision
from nsm_core.formats.int4_groups import PackedInt4, quantize_int4
from nsm_core.formats.int8_rows import Int8Rows
from nsm_core.formats.one_thread import one_thread
from nsm_core.model.attention import WindowAttention
from nsm_core.model.block import Block
from nsm_core.model.keyed import KeyedMixer
from nsm_core.model.nsm import NsmModel
from nsm_core.model.pulse import PulseMixer
from nsm_core.model.router import SoftmaxRouter
from nsm_core.model.storage import StoredRows, quantize_rows

KINDS: dict[type, Kind] = {PulseMixer: Kind.SLOTS, WindowAttention: Kind.ATTENTION, KeyedMixer: Kind.KEYED}


def native_unsupported_reason(model: object) -> str | None:
    """Why this model cannot run on the native kernels here, in words; None when it can."""
    if load_library() is None:
        return missing_reason()
    if type(model) is not NsmModel:
        return f"the native kernels run models of the class NsmModel, not {type(model).__name__}"
    if model.embedding.weight.device.type != "cpu":
        return "the native kernels run on a CPU"
    unknown = {type(block.mixer) for block in model.layers} - set(KINDS)
    if unknown:
        return f"the native kernels have no layers of the kind {', '.join(sorted(kind.__name__ for kind in unknown))}"
    config = model.config
    if config.projector != "attention":
        return f"the native kernels read slots by attention alone, its projector is {config.projector}"
    for name in ("d_model", "head_dim", "mlp_hidden", "slot_width"):
        if getattr(config, name) % LANES != 0:
            return f"the native kernels need a multiple of {LANES}: {name} is {getattr(config, name)}"
    for name, most in (("head_dim", MAX_HEAD_DIM), ("num_memory_slots", MAX_SLOTS)):
        if getattr(config, name) > most:
            return f"the native kernels take at most {most}: {name} is {getattr(config, name)}"
    return None


def packed_matrices(model: NsmModel) -> dict[str, tuple[int, Part, Tensor]]:
    """The parameters that are packed as rows of whole numbers, by name, with their places in the kernels' model."""
    found = {"embedding.weight": (0, Part.EMBEDDING, model.embedding.weight)}
    parts = {"mlp.up": Part.UP, "mlp.down": Part.DOWN, "mixer.project": Part.PROJECT, "mixer.out": Part.OUT}
    for index, block in enumerate(model.layers):
        for name, part in parts.items():
            weight = block.get_parameter(f"{name}.weight")
            found[f"blocks.{index}.{name}.weight"] = (index, part, weight)
    return found


class NativeWeights:
    """A packed copy of a model's weights, rounded to int8 or int4; matrices that are int8 by rows stay so in int8.

    `variant`: one of `variants()`. `matrices`: by name of parameter, those that a file has as rows of whole numbers,
    which are packed as they are if `precision` is theirs; what the model has in their places is not read.

    Raises ValueError for a model that `native_unsupported_reason` refuses.
    """

    def __init__(
        self,
        model: NsmModel,
        variant: str | None = None,
        *,
        precision: Precision = Precision.INT8,
        matrices: Mapping[str, StoredRows] | None = None,
    ) -> None:
        reason, library = native_unsupported_reason(model), load_library()
        if reason is not None or library is None:
            raise ValueError(reason)
        self.variant = variants()[0] if variant is None else variant
        self.config, self.precision = model.config, precision
        self._library = library
        kinds = [KINDS[type(block.mixer)] for block in model.layers]
        windows = [block.mixer.window if isinstance(block.mixer, WindowAttention) else 0 for block in model.layers]
        per_layer = ctypes.c_int32 * len(kinds)
        self._handle = library.nsm_model_new(
            ctypes.byref(_shape_of(model, precision)), per_layer(*kinds), per_layer(*windows), self.variant.encode()
        )
        if self._handle is None:
            raise ValueError(f"this processor has no kernels {self.variant}; it has {', '.join(variants())}")
        weakref.finalize(self, library.nsm_model_free, self._handle).atexit = False
        self._pack(model, matrices or {})

    @property
    def handle(self) -> int:
        """The address that the library knows the model by; lives as long as this object."""
        return int(self._handle)

    def rows(self, layer: int, part: Part, rows: Tensor, num_cols: int) -> Tensor:
        """Rows [R] int64 of a matrix of `num_cols` columns, as they are multiplied with: [R, num_cols] fp32.

        Raises IndexError for a row or a matrix that is not there.
        """
        rows = rows.contiguous()
        out = torch.empty(len(rows), num_cols)
        if not self._library.nsm_model_get_rows(self._handle, layer, part, rows.data_ptr(), len(rows), out.data_ptr()):
            raise IndexError(f"{part.name} {layer} has no such rows")
        return out

    @one_thread()
    @torch.no_grad()
    def _pack(self, model: NsmModel, matrices: Mapping[str, StoredRows]) -> None:
        for name, (index, part, weight) in packed_matrices(model).items():
            self._matrix(index, part, weight, matrices.get(name))
        self._floats(0, Part.FINAL_NORM, model.final_norm.weight)
        for index, block in enumerate(model.layers):
            self._block(index, block)
            if isinstance(block.mixer, PulseMixer):
                self._slot_layer(index, block.mixer)
            elif isinstance(block.mixer, KeyedMixer):
                self._keyed_layer(index, block.mixer)
            elif isinstance(block.mixer, WindowAttention):
                self._attention_layer(index, block.mixer)
        self._check(self._library.nsm_model_seal(self._handle), "the model")

    def _block(self, index: int, block: Block) -> None:
        self._floats(index, Part.MIXER_NORM, block.mixer_norm.weight)
        self._floats(index, Part.MLP_NORM, block.mlp_norm.weight)

    def _slot_layer(self, index: int, mixer: PulseMixer) -> None:
        self._floats(index, Part.OUT_NORM, mixer.out_norm)
        self._floats(index, Part.CONV, mixer.conv.weight)
        if mixer.log_scale is not None:  # as in all models that the kernels take
            self._floats(index, Part.READ_SCALE, exact_exp(mixer.log_scale) * (2.0 / math.sqrt(mixer.head_dim)))
        router = mixer.router
        weight: Tensor = router.logits.weight
        bias: Tensor = router.logits.bias
        if isinstance(router, SoftmaxRouter):
            weight, bias = torch.cat((weight, router.strength.weight)), torch.cat((bias, router.strength.bias))
            self._floats(index, Part.SELECTION_BIAS, router.selection_bias)
            self._floats(index, Part.TIMESCALE, exact_exp(router.log_timescale))
        self._router(index, weight, bias)

    def _keyed_layer(self, index: int, mixer: KeyedMixer) -> None:
        self._floats(index, Part.OUT_NORM, mixer.out_norm)
        self._floats(index, Part.SKIP, mixer.skip)
        self._floats(index, Part.READ_TAPS, mixer.conv.read)
        self._floats(index, Part.WRITE_TAPS, mixer.conv.write)
        self._floats(index, Part.CONV, mixer.conv.value)
        self._router(index, mixer.rates.weight, mixer.rates.bias)

    def _attention_layer(self, index: int, mixer: WindowAttention) -> None:
        self._floats(index, Part.READ_SCALE, exact_exp(mixer.log_scale) / math.sqrt(mixer.head_dim))
        exponents = torch.arange(0, mixer.head_dim, 2, dtype=torch.float64) / mixer.head_dim
        frequencies = (mixer.rope_base**-exponents).contiguous()
        self._check(
            self._library.nsm_model_set_rotary(self._handle, frequencies.data_ptr(), len(frequencies)), "rotary"
        )

    def _router(self, index: int, weight: Tensor, bias: Tensor) -> None:
        """What stays fp16: the router of slots, or the rates of keyed ones."""
        half = weight.half().contiguous()
        self._check(
            self._library.nsm_model_set_router(self._handle, index, half.data_ptr(), *half.shape), f"router {index}"
        )
        self._floats(index, Part.ROUTER_BIAS, bias)

    def _matrix(self, index: int, part: Part, weight: Tensor, stored: StoredRows | None) -> None:
        if self.precision is Precision.INT4:
            self._int4_matrix(index, part, weight, stored)
            return
        if isinstance(stored, Int8Rows):
            quantized, scale = stored.quantized()
        else:
            quantized, scale = quantize_rows(weight if stored is None else stored.dense())
        quantized, scale = quantized.contiguous(), scale.contiguous()
        done = self._library.nsm_model_set_matrix(
            self._handle, index, part, quantized.data_ptr(), scale.data_ptr(), *quantized.shape
        )
        self._check(done, f"{part.name} {index}")

    def _int4_matrix(self, index: int, part: Part, weight: Tensor, stored: StoredRows | None) -> None:
        if isinstance(stored, PackedInt4):
            rows = stored.rows()
        else:
            rows = quantize_int4(weight if stored is None else stored.dense())
        done = self._library.nsm_model_set_matrix4(
            *(self._handle, index, part, rows.numbers.data_ptr(), rows.steps.data_ptr(), rows.offsets.data_ptr()),
            *(rows.scale.data_ptr(), *rows.numbers.shape),
        )
        self._check(done, f"{part.name} {index}")

    def _floats(self, index: int, part: Part, values: Tensor) -> None:
        flat = values.float().contiguous().flatten()
        self._check(
            self._library.nsm_model_set_floats(self._handle, index, part, flat.data_ptr(), len(flat)),
            f"{part.name} {index}",
        )

    @staticmethod
    def _check(is_done: int, part: str) -> None:
        if not is_done:
            raise ValueError(f"the native kernels cannot take this model: {part} has another size")


def exact_exp(log: Tensor) -> Tensor:
    """exp [...] in fp32, as fp64 rounds it. In fp32 its last bit is not the same on all processors."""
    return log.double().exp().float()


def _shape_of(model: NsmModel, precision: Precision) -> Shape:
    config = model.config
    return Shape(
        vocab_size=config.vocab_size,
        d_model=config.d_model,
        num_layers=config.num_layers,
        heads=config.num_heads,
        slots=config.num_memory_slots,
        top_k=config.write_top_k,
        taps=config.conv_taps,
        mlp_hidden=config.mlp_hidden,
        kv_heads=config.num_kv_heads,
        is_softmax_router=int(config.router == "softmax"),
        slot_width=config.slot_width or config.head_dim,
        is_int4=int(precision is Precision.INT4),
        taper=config.taper,
        eps=config.norm_eps,
    )
