"""Model files: `config.json`, `weights.safetensors`, `tokenizer.json` in one directory.

Beside them lies `tokenizer_config.json`, which this package writes for other programs and does not read.

Weights are stored as fp32, bf16, int8 or int4. In int8 files the large matrices hold one int8 per weight and one fp32
scale per row, in int4 files numbers of 4 bits on grids of int8. Tensors sensitive to rounding (router, learned states)
stay fp16 there, and vectors fp32.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.overrides import TorchFunctionMode

from nsm_core.chat_template import get_template
from nsm_core.config import ModelConfig
from nsm_core.errors import CheckpointError, reason_of
from nsm_core.formats.foreign_content import describe_foreign
from nsm_core.formats.int4_groups import PackedInt4, is_packable, quantize_int4
from nsm_core.formats.int8_rows import Int8Rows
from nsm_core.formats.int8_rows import quantize_rows as quantize_rows
from nsm_core.formats.one_thread import one_thread
from nsm_core.formats.random_access import RandomAccessFile
from nsm_core.formats.safetensors_file import is_safetensors, read_safetensors
from nsm_core.model.bundled import no_model
from nsm_core.model.identity import CONFIG_FILE as CONFIG_FILE
from nsm_core.model.identity import WEIGHTS_FILE as WEIGHTS_FILE
from nsm_core.model.identity import fingerprint as fingerprint
from nsm_core.model.nsm import NsmModel
from nsm_core.model.router import Router
from nsm_core.tokenizer import DESCRIPTION_FILE, TOKENIZER_FILE, BpeTokenizer, Tokenizer, describe

SCALE_SUFFIX, STEPS_SUFFIX, OFFSETS_SUFFIX = ".row_scale", ".int4_steps", ".int4_offsets"
_SUFFIXES = (SCALE_SUFFIX, STEPS_SUFFIX, OFFSETS_SUFFIX)

# Rounding these would move slot choices or the start of every session: they have more bits than other matrices.
SENSITIVE = ("router.", "initial_slots", "rates.")


def parameter_of(name: str) -> str:
    """Of a tensor in a file: the parameter that it is, or that it is a scale or a grid of."""
    for suffix in _SUFFIXES:
        name = name.removesuffix(suffix)
    return name


class WeightFormat(enum.StrEnum):
    """How the large matrices are stored."""

    FP32 = "fp32"
    BF16 = "bf16"
    INT8 = "int8"
    INT4 = "int4"


StoredRows = Int8Rows | PackedInt4


class BadRows(ValueError):
    """A matrix of whole numbers that a file holds and nothing can compute with."""


def is_rounded(name: str, value: Tensor) -> bool:
    """Whether int8 and int4 files round this weight to rows of whole numbers."""
    return value.ndim >= 2 and "conv." not in name and not any(part in name for part in SENSITIVE)


def _encode(name: str, value: Tensor, weight_format: WeightFormat) -> dict[str, Tensor]:
    value = value.detach().cpu().float().contiguous()
    if weight_format is WeightFormat.FP32 or value.ndim < 2:
        return {name: value}
    if weight_format is WeightFormat.BF16:
        return {name: value.to(torch.bfloat16)}
    if not is_rounded(name, value):
        return {name: value if "conv." in name else value.half()}
    if weight_format is WeightFormat.INT4 and is_packable(tuple(value.shape)):
        return _packed_tensors(name, quantize_int4(value).packed())
    quantized, scale = quantize_rows(value)
    return {name: quantized, name + SCALE_SUFFIX: scale}


def _packed_tensors(name: str, packed: PackedInt4) -> dict[str, Tensor]:
    grids = {name + STEPS_SUFFIX: packed.steps, name + OFFSETS_SUFFIX: packed.offsets}
    return {name: packed.numbers, name + SCALE_SUFFIX: packed.scale, **grids}


def _stored_rows(name: str, stored: Mapping[str, Tensor]) -> StoredRows | None:
    """A matrix of whole numbers, of this name in a file; None for any other tensor. Raises BadRows."""
    scale, steps, offsets = (stored.get(name + suffix) for suffix in _SUFFIXES)
    value = stored[name]
    if scale is not None and steps is not None and offsets is not None:
        packed = PackedInt4(value, steps, offsets, scale)
        fault = packed.fault()
        if fault is not None:
            raise BadRows(f"the tensor {name} {fault}")
        return packed
    if value.dtype == torch.uint8:
        raise BadRows(f"the tensor {name} holds numbers of 4 bits without their grids")
    return None if scale is None else Int8Rows(value, scale)


def _decode(stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies: `stored` is mapped from the file, which may be overwritten."""
    weights = {}
    for name, value in stored.items():
        if not name.endswith(_SUFFIXES):
            rows = _stored_rows(name, stored)
            weights[name] = value.to(torch.float32, copy=True) if rows is None else rows.dense()
    return weights


class NoStart(TorchFunctionMode):
    """Creates modules without initial values: untouched memory is not resident.

    The device `meta` would do the same but imports a compiler: two seconds and 140 MiB.
    """

    FILLS = frozenset(("normal_", "uniform_", "kaiming_uniform_", "zero_", "fill_"))

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.__name__ in self.FILLS:
            return args[0] if args else (kwargs or {})["tensor"]
        return func(*args, **(kwargs or {}))


@dataclasses.dataclass(frozen=True, slots=True)
class ModelFiles:
    """The contents of a model directory. `tensors`: as stored, rounded matrices beside their scales and grids."""

    config: ModelConfig
    tokenizer: Tokenizer
    tensors: Mapping[str, Tensor]
    weight_format: WeightFormat


def save_model(model: NsmModel, tokenizer: Tokenizer, directory: Path, weight_format: WeightFormat) -> None:
    """Writes the files; each appears whole or not at all."""
    tensors: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        tensors.update(_encode(name, value, weight_format))
    write_files(directory, ModelFiles(model.config, tokenizer, tensors, weight_format))


def convert_model(source: Path, directory: Path, weight_format: WeightFormat, *, chat_template: str | None) -> None:
    """Writes the model of `source` in another format; numbers that are in it already stay as they are.

    `chat_template`: another one, by name or in Jinja. Raises CheckpointError or ConfigError naming the file.
    """
    files = read_files(source)
    config = files.config if chat_template is None else dataclasses.replace(files.config, chat_template=chat_template)
    tensors = dict(files.tensors)
    if files.weight_format is not weight_format:
        with _naming_weights(source), one_thread():
            tensors = {}
            for name, value in _decode(files.tensors).items():
                tensors.update(_encode(name, value, weight_format))
    write_files(directory, ModelFiles(config, files.tokenizer, tensors, weight_format))


def write_files(directory: Path, files: ModelFiles) -> None:
    """As `save_model`, of tensors that are encoded already."""
    directory.mkdir(parents=True, exist_ok=True)
    metadata = {"format": files.weight_format.value}
    _publish(directory / WEIGHTS_FILE, lambda path: save_file(dict(files.tensors), str(path), metadata=metadata))
    _publish(directory / CONFIG_FILE, lambda path: path.write_text(files.config.to_json(), "utf-8"))
    _publish(directory / TOKENIZER_FILE, files.tokenizer.save)
    description = json.dumps(describe(get_template(files.config.chat_template), files.tokenizer), indent=2)
    _publish(directory / DESCRIPTION_FILE, lambda path: path.write_text(f"{description}\n", "utf-8"))


def _publish(target: Path, write: Callable[[Path], object]) -> None:
    """Replaces the file atomically: readers, and runs resumed after a kill, find the old file or the new one."""
    partial = target.with_name(target.name + ".partial")
    write(partial)
    partial.chmod(0o644)  # the weights' library makes files that only their owner may read
    os.replace(partial, target)


def _read_format(path: Path) -> WeightFormat:
    """From the header alone."""
    try:
        with safe_open(str(path), framework="pt") as file:
            return WeightFormat((file.metadata() or {}).get("format", "fp32"))
    except (OSError, SafetensorError, ValueError) as error:
        raise _unreadable(path, error) from error


def _read_tensors(path: Path) -> tuple[dict[str, Tensor], WeightFormat]:
    try:
        with safe_open(str(path), framework="pt") as file:
            metadata = file.metadata() or {}
            return {name: file.get_tensor(name) for name in file.keys()}, WeightFormat(metadata.get("format", "fp32"))
    except (OSError, SafetensorError, ValueError) as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> CheckpointError:
    """In the words of the reader for single files, which names the tensor."""
    try:
        file = RandomAccessFile(path)
        if not is_safetensors(file):
            return CheckpointError(f"{path} is no .safetensors file{describe_foreign(file)}")
        read_safetensors(file)
    except CheckpointError as found:
        return found
    return CheckpointError(f"cannot read weights {path}: {reason_of(error)}")


def require_directory(directory: Path) -> None:
    """Raises CheckpointError for a path where no model can be."""
    if not directory.exists():
        raise no_model(directory)
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is a file: expected a model directory")
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if not (directory / name).exists():
            raise CheckpointError(f"no model in {directory}: it has no {name}")


def _read_description(directory: Path) -> tuple[ModelConfig, Tokenizer]:
    require_directory(directory)
    config = ModelConfig.load(directory / CONFIG_FILE)
    tokenizer = BpeTokenizer.load(directory)
    if tokenizer.vocab_size > config.vocab_size:
        raise CheckpointError(
            f"{directory}: the tokenizer has {tokenizer.vocab_size} tokens, the model only {config.vocab_size}"
        )
    return config, tokenizer


def read_files(directory: Path) -> ModelFiles:
    """Raises CheckpointError or ConfigError naming the file."""
    return ModelFiles(*_read_description(directory), *_read_tensors(directory / WEIGHTS_FILE))


def read_outline(directory: Path) -> tuple[NsmModel, Tokenizer, WeightFormat]:
    """As `read_model` without reading a weight: shapes and dtypes are right, the numbers are whatever lies in memory.

    Raises CheckpointError or ConfigError naming the file.
    """
    config, tokenizer = _read_description(directory)
    with NoStart():
        model = NsmModel(config)
    return model.eval().requires_grad_(False), tokenizer, _read_format(directory / WEIGHTS_FILE)


@one_thread()
def read_model(directory: Path) -> tuple[NsmModel, Tokenizer, WeightFormat]:
    """The model in fp32 on the CPU, in eval mode. Raises CheckpointError or ConfigError naming the file."""
    files = read_files(directory)
    with _naming_weights(directory):
        return _model_of(directory, files.config, _decode(files.tensors)), files.tokenizer, files.weight_format


@dataclasses.dataclass(frozen=True, slots=True)
class OpenedModel:
    """A model whose large matrices are still as in the file.

    `matrices`: by name of parameter, mapped from the file; the parameter itself holds NaN and takes no memory.
    """

    model: NsmModel
    tokenizer: Tokenizer
    weight_format: WeightFormat
    matrices: Mapping[str, StoredRows]


@one_thread()
def open_model(directory: Path) -> OpenedModel:
    """As `read_model`, without the matrices that are rounded in the file: kernels take them as they are stored."""
    files = read_files(directory)
    stored, matrices, others = files.tensors, {}, {}
    with _naming_weights(directory):
        for name in (name for name in stored if not name.endswith(_SUFFIXES)):
            rows = _stored_rows(name, stored)
            if rows is None:
                others[name] = stored[name].to(torch.float32, copy=True)
            elif not bool(torch.isfinite(rows.scale).all()):
                raise _not_finite(directory / WEIGHTS_FILE, name)
            else:
                matrices[name] = rows
        shapes = {name: _shape(rows) for name, rows in matrices.items()}
        hollow = {name: torch.full((), torch.nan).expand(shape) for name, shape in shapes.items()}
        model = _model_of(directory, files.config, others, hollow)
    return OpenedModel(model, files.tokenizer, files.weight_format, matrices)


def fill(model: NsmModel, matrices: Mapping[str, StoredRows]) -> None:
    """Makes an opened model one that was read."""
    for name, rows in matrices.items():
        model.get_parameter(name).data = rows.dense()


def _shape(rows: StoredRows) -> tuple[int, ...]:
    shape = tuple(rows.numbers.shape)
    return (shape[0], 2 * shape[1]) if isinstance(rows, PackedInt4) else shape


def _model_of(
    directory: Path, config: ModelConfig, tensors: dict[str, Tensor], hollow: Mapping[str, Tensor] | None = None
) -> NsmModel:
    """`hollow`: tensors that hold no weights yet."""
    with NoStart():
        model = NsmModel(config)  # fails for sizes that no machine has the memory for
    _require_finite(directory / WEIGHTS_FILE, tensors)
    model.load_state_dict({**tensors, **(hollow or {})}, assign=True)
    for router in (module for module in model.modules() if isinstance(module, Router)):
        router.reset_load()  # not stored
    return model.eval().requires_grad_(False)


@contextlib.contextmanager
def _naming_weights(directory: Path) -> Iterator[None]:
    """Errors of tensors that do not fit name the file."""
    try:
        yield
    except BadRows as error:
        raise CheckpointError(f"{directory / WEIGHTS_FILE}: {error}") from error
    except RuntimeError as error:
        summary = " ".join(str(error).split())[:300]
        raise CheckpointError(f"{directory / WEIGHTS_FILE} does not fit {CONFIG_FILE}: {summary}") from error


def _require_finite(path: Path, tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor.sum(dtype=torch.float64))):
            raise _not_finite(path, name)


def _not_finite(path: Path, name: str) -> CheckpointError:
    return CheckpointError(f"{path}: the tensor {name} holds a number that is not finite")
