"""An RWKV-7 model's weights in the layout of its native kernels, packed from the file one tensor at a time."""

from __future__ import annotations

import ctypes
import functools
import logging
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from nsm_core.execution.native.library import LANES, MAX_HEAD_DIM, missing_reason, variants
from nsm_core.execution.native.precision import Precision
from nsm_core.execution.rwkv7.library import Numbers, Rwkv7Part, Rwkv7Shape, load_rwkv7_library
from nsm_core.formats.int4_groups import Int4Rows, quantize_int4
from nsm_core.formats.one_thread import one_thread
from nsm_core.model.storage import quantize_rows
from nsm_core.rwkv7.config import Rwkv7Config
from nsm_core.rwkv7.model import Rwkv7Model
from nsm_core.rwkv7.weights import CheckedTensors

logger = logging.getLogger("nsm.execution")

LARGE = {
    Rwkv7Part.RECEPTANCE: "att.receptance.weight",
    Rwkv7Part.KEY: "att.key.weight",
    Rwkv7Part.VALUE: "att.value.weight",
    Rwkv7Part.OUTPUT: "att.output.weight",
    Rwkv7Part.CHANNEL_KEY: "ffn.key.weight",
    Rwkv7Part.CHANNEL_VALUE: "ffn.value.weight",
}
# The first of two small matrices; the second follows it
SMALL = {
    Rwkv7Part.DECAY_IN: "w",
    Rwkv7Part.RATE_IN: "a",
    Rwkv7Part.VALUE_IN: "v",
    Rwkv7Part.GATE_IN: "g",
}
VECTORS = {
    Rwkv7Part.TIME_NORM: "ln1.weight",
    Rwkv7Part.TIME_NORM_BIAS: "ln1.bias",
    Rwkv7Part.CHANNEL_NORM: "ln2.weight",
    Rwkv7Part.CHANNEL_NORM_BIAS: "ln2.bias",
    Rwkv7Part.CHANNEL_SHIFT: "ffn.x_k",
    Rwkv7Part.REMOVAL_KEY: "att.k_k",
    Rwkv7Part.KEY_RATE: "att.k_a",
    Rwkv7Part.BONUS: "att.r_k",
    Rwkv7Part.HEAD_NORM: "att.ln_x.weight",
    Rwkv7Part.HEAD_NORM_BIAS: "att.ln_x.bias",
}
ONCE = {
    Rwkv7Part.FIRST_NORM: "blocks.0.ln0.weight",
    Rwkv7Part.FIRST_NORM_BIAS: "blocks.0.ln0.bias",
    Rwkv7Part.LAST_NORM: "ln_out.weight",
    Rwkv7Part.LAST_NORM_BIAS: "ln_out.bias",
}


def rwkv7_unsupported_reason(config: Rwkv7Config) -> str | None:
    """Why a model of these sizes cannot run on the native kernels here, in words; None when it can."""
    if load_rwkv7_library() is None:
        return missing_reason()
    for name in ("width", "head_size", "hidden"):
        if getattr(config, name) % LANES != 0:
            return f"the native kernels need a multiple of {LANES}: {name} is {getattr(config, name)}"
    if config.head_size > MAX_HEAD_DIM:
        return f"the native kernels take at most {MAX_HEAD_DIM}: head_size is {config.head_size}"
    return None


ROUNDED = {Precision.INT8: Numbers.INT8, Precision.INT4: Numbers.INT4}
# Large matrices of files in half precision stay in it: each number is one in fp32 too, and gives the same bits
HALVES = {"bf16": (Numbers.BF16, torch.bfloat16), "fp16": (Numbers.FP16, torch.float16)}


def pack_rwkv7(model: Rwkv7Model, precision: Precision, weight_format: str, *, num_threads: int = 1) -> Rwkv7Weights:
    """A packed copy for a file of this format, in half precision if all its large matrices are. Raises as the class."""
    if precision is Precision.FP32 and weight_format in HALVES:
        try:
            return Rwkv7Weights(model, precision, numbers=HALVES[weight_format][0], num_threads=num_threads)
        except OtherNumbersError as error:
            logger.info("weights are held in fp32: %s", error)
    return Rwkv7Weights(model, precision, num_threads=num_threads)


class OtherNumbersError(Exception):
    """A large matrix is not in the numbers of the others."""


class Rwkv7Weights:
    """A packed copy of a model's tensors; at its peak it needs the memory of one tensor more for each thread.

    `embedding`: [V, D] in the dtype of the file; rows of it are read, never multiplied. `variant`: one of `variants()`.
    `numbers`: of large matrices in fp32, as the file has them. `num_threads` pack a layer each. Raises ValueError for a
    model that `rwkv7_unsupported_reason` refuses, CheckpointError that names a bad tensor, OtherNumbersError.
    """

    @one_thread()
    def __init__(
        self,
        model: Rwkv7Model,
        precision: Precision,
        variant: str | None = None,
        *,
        numbers: Numbers = Numbers.FP32,
        num_threads: int = 1,
    ) -> None:
        reason, library = rwkv7_unsupported_reason(model.config), load_rwkv7_library()
        if reason is not None or library is None:
            raise ValueError(reason)
        self.config, self.precision, self.num_ids = model.config, precision, model.num_ids
        self._library = library
        self._numbers = ROUNDED.get(precision, numbers)
        self._tensors = CheckedTensors(model.config, model.tensors)
        self._handle = library.nsm_rwkv7_model_new(
            ctypes.byref(_shape_of(model, self._numbers)), (variant or variants()[0]).encode()
        )
        if self._handle is None:
            raise ValueError(f"no memory for the weights, or no kernels {variant or variants()[0]} here")
        weakref.finalize(self, library.nsm_rwkv7_model_free, self._handle).atexit = False
        self.embedding: Tensor
        self._pack(num_threads)

    @property
    def handle(self) -> int:
        """The address that the library knows the model by; lives as long as this object."""
        return int(self._handle)

    def _pack(self, num_threads: int) -> None:
        with ThreadPoolExecutor(num_threads, "packing") as pool:
            packed = [pool.submit(pack) for pack in self._parts()]
            try:
                for each in packed:
                    each.result()
            finally:
                pool.shutdown(cancel_futures=True)
        self._check(self._library.nsm_rwkv7_seal(self._handle), "the model")

    def _parts(self) -> Iterator[Callable[[], None]]:
        """What packs them, the largest first."""
        yield functools.partial(self._large, 0, Rwkv7Part.HEAD, "head.weight", num_rows=self.num_ids)
        yield self._pack_once
        for layer in range(self.config.num_layers):
            yield functools.partial(self._pack_layer, layer)

    def _pack_once(self) -> None:
        self.embedding = self._tensors.stored("emb.weight")
        for part, name in ONCE.items():
            self._floats(0, part, self._tensors[name])

    def _pack_layer(self, layer: int) -> None:
        prefix = f"blocks.{layer}."
        for part, name in LARGE.items():
            self._large(layer, part, prefix + name)
        for part, name in VECTORS.items():
            self._floats(layer, part, self._tensors[prefix + name])
        shifts = [self._tensors[f"{prefix}att.x_{letter}"] for letter in "rwkvag"]
        self._floats(layer, Rwkv7Part.TIME_SHIFT, torch.cat(shifts))
        for part, letter in SMALL.items():
            if letter != "v" or layer > 0:
                self._small(layer, part, f"{prefix}att.{letter}")

    def _large(self, layer: int, part: Rwkv7Part, name: str, num_rows: int | None = None) -> None:
        if self.precision is Precision.FP32:
            self._matrix(layer, part, self._unrounded(name)[:num_rows], None)
            return
        if self.precision is Precision.INT4:
            self._int4(layer, part, self._int4_rows(name).first(num_rows))
            return
        quantized, scale = self._int8_rows(name)
        quantized, scale = quantized[:num_rows].contiguous(), scale[:num_rows].contiguous()
        done = self._library.nsm_rwkv7_set_int8(
            self._handle, layer, part, quantized.data_ptr(), scale.data_ptr(), *quantized.shape
        )
        self._check(done, name)

    def _int8_rows(self, name: str) -> tuple[Tensor, Tensor]:
        rows = self._tensors.rows(name)
        return quantize_rows(self._tensors.stored(name)) if rows is None else rows.quantized()

    def _int4_rows(self, name: str) -> Int4Rows:
        packed = self._tensors.packed(name)
        return quantize_int4(self._tensors[name]) if packed is None else packed.rows()

    def _int4(self, layer: int, part: Rwkv7Part, rows: Int4Rows) -> None:
        done = self._library.nsm_rwkv7_set_int4(
            *(self._handle, layer, part, rows.numbers.data_ptr(), rows.steps.data_ptr(), rows.offsets.data_ptr()),
            *(rows.scale.data_ptr(), *rows.numbers.shape),
        )
        self._check(done, f"{part.name} {layer}")

    def _unrounded(self, name: str) -> Tensor:
        if self._numbers is Numbers.FP32:
            return self._tensors[name]
        stored = self._tensors.stored(name)
        if stored.dtype != next(dtype for numbers, dtype in HALVES.values() if numbers is self._numbers):
            raise OtherNumbersError(f"the tensor {name} holds {stored.dtype}")
        return stored.contiguous()

    def _small(self, layer: int, part: Rwkv7Part, name: str) -> None:
        """Two matrices that official files multiply from the right, and the vector that is added to their product."""
        bias = self._tensors[f"{name}0"] if not name.endswith("g") else None
        for index, own in enumerate((None, bias)):
            weight = self._tensors[f"{name}{index + 1}"].T.contiguous()
            if self.precision is not Precision.FP32:
                weight = weight.half()
                if not bool(weight.isfinite().all()):
                    raise self._tensors.refusal(f"{name}{index + 1}", "holds numbers that fp16 cannot")
            self._matrix(layer, Rwkv7Part(part + index), weight, own)

    def _matrix(self, layer: int, part: Rwkv7Part, weight: Tensor, bias: Tensor | None) -> None:
        address = None if bias is None else bias.data_ptr()
        done = self._library.nsm_rwkv7_set_matrix(self._handle, layer, part, weight.data_ptr(), address, *weight.shape)
        self._check(done, f"{part.name} {layer}")

    def _floats(self, layer: int, part: Rwkv7Part, values: Tensor) -> None:
        flat = values.flatten()
        done = self._library.nsm_rwkv7_set_floats(self._handle, layer, part, flat.data_ptr(), len(flat))
        self._check(done, f"{part.name} {layer}")

    @staticmethod
    def _check(is_done: int, part: str) -> None:
        if not is_done:
            raise ValueError(f"the native kernels cannot take this model: {part} has another size")


def _shape_of(model: Rwkv7Model, numbers: Numbers) -> Rwkv7Shape:
    config = model.config
    return Rwkv7Shape(
        vocab_size=model.num_ids,
        width=config.width,
        num_layers=config.num_layers,
        head_size=config.head_size,
        hidden=config.hidden,
        decay_rank=config.decay_rank,
        rate_rank=config.rate_rank,
        value_rank=config.value_rank,
        gate_rank=config.gate_rank,
        large=numbers,
        norm_eps=config.norm_eps,
        head_eps=config.head_norm_eps,
    )
