"""Which files make up a model at a path, by their content: official ones, Hugging Face's, GGUF, our own."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from nsm_core.errors import CheckpointError, reason_of
from nsm_core.formats.foreign_content import describe_foreign
from nsm_core.formats.gguf_file import Gguf, is_gguf, read_gguf
from nsm_core.formats.pytorch_file import read_pytorch
from nsm_core.formats.random_access import RandomAccessFile
from nsm_core.formats.safetensors_file import is_safetensors, read_safetensors
from nsm_core.formats.stored_tensor import StoredTensor, shown_name
from nsm_core.formats.zip_entries import is_zip
from nsm_core.rwkv7.claims import ARCHITECTURE, CONFIG_FILE, WEIGHT_SUFFIXES, WEIGHTS_FILE, read_json
from nsm_core.rwkv7.layouts import GGUF, HUGGING_FACE, OFFICIAL, Layout
from nsm_core.rwkv7.reading import Hints

HF_ARCHITECTURE = "RWKV7ForCausalLM"
HF_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
MAX_SHARDS = 4096


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A model's files. `directory`: where tokenizer and template are; `fields`: its `config.json`, if it has one."""

    path: Path
    directory: Path
    form: str
    layout: Layout
    stored: Mapping[str, StoredTensor]
    hints: Hints
    modified: int
    gguf: Gguf | None = None
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def find_files(path: Path) -> Found:
    """Reads headers alone. Raises CheckpointError, which describes the path's content and why it cannot be served."""
    if not path.is_dir():
        return _single_file(RandomAccessFile(path))
    if not (path / CONFIG_FILE).exists():
        return dataclasses.replace(_single_file(RandomAccessFile(_only_weights(path))), path=path)
    fields = read_json(path / CONFIG_FILE)
    if "architecture" in fields:
        return _own_directory(path, fields)
    return _hugging_face_directory(path, fields)


def _single_file(file: RandomAccessFile) -> Found:
    gguf: Gguf | None = None
    layout, hints = OFFICIAL, Hints()
    if is_gguf(file):
        gguf = read_gguf(file)
        form, layout, stored, hints = "GGUF", GGUF, gguf.tensors, _gguf_hints(file.path, gguf)
    elif is_zip(file):
        form, stored = "PyTorch", read_pytorch(file)
    elif is_safetensors(file):
        form, (stored, _) = "safetensors", read_safetensors(file)
    else:
        why = describe_foreign(file)
        raise CheckpointError(f"{file.path} is none of .pth (a zip archive), .safetensors and GGUF{why}")
    if layout is OFFICIAL and _layout_of(file.path, stored) is not OFFICIAL:
        raise CheckpointError(f"{file.path} is in Hugging Face's layout: give its directory, which has {CONFIG_FILE}")
    return Found(
        path=file.path,
        directory=file.path.parent,
        form=form,
        layout=layout,
        stored=stored,
        hints=hints,
        modified=file.modified,
        gguf=gguf,
    )


def _layout_of(path: Path, stored: Mapping[str, StoredTensor]) -> Layout:
    if "blocks.0.att.time_decay" in stored:
        raise CheckpointError(f"{path}: the tensor blocks.0.att.time_decay is of RWKV-6 or older; served is RWKV-7")
    if "emb.weight" in stored and "blocks.0.att.r_k" in stored:
        return OFFICIAL
    if "model.embeddings.weight" in stored and "model.layers.0.attn.r_k" in stored:
        return HUGGING_FACE
    raise CheckpointError(f"{path}: {_described_part(stored)}")


def _described_part(stored: Mapping[str, StoredTensor]) -> str:
    """Why tensors are no whole model."""
    for name in stored:
        if ".lora_A" in name or ".lora_B" in name:
            return f"the tensor {shown_name(name)} is an adapter's (LoRA): merge it into its model first"
    if stored and all(name.endswith(".time_state") for name in stored):
        return f"the tensor {shown_name(next(iter(stored)))} is a start state's, and the file has no model"
    if any(name.startswith("model.layers.") and ".attn.w_lora.lora." in name for name in stored):
        return f"some tensors of a model in Hugging Face's layout: give the directory with {CONFIG_FILE} and all parts"
    names = ", ".join(shown_name(name) for name in list(stored)[:3]) or "none"
    return f"the tensors ({names}, ...) are those of another architecture than RWKV-7"


def _gguf_hints(path: Path, gguf: Gguf) -> Hints:
    architecture = gguf.text("general.architecture")
    if architecture != ARCHITECTURE:
        raise CheckpointError(f"{path}: the architecture is {str(architecture)[:40]!r}; served is {ARCHITECTURE!r}")
    epsilon = gguf.keys.get(f"{ARCHITECTURE}.attention.layer_norm_epsilon")
    return Hints(
        num_layers=gguf.whole(f"{ARCHITECTURE}.block_count"),
        width=gguf.whole(f"{ARCHITECTURE}.embedding_length"),
        head_size=gguf.whole(f"{ARCHITECTURE}.wkv.head_size"),
        # The file has it in fp32, and other files have the same number as a decimal
        norm_eps=float(f"{epsilon:.6g}") if type(epsilon) is float else Hints().norm_eps,
    )


def _only_weights(directory: Path) -> Path:
    try:
        found = sorted(path for path in directory.iterdir() if path.suffix in WEIGHT_SUFFIXES and path.is_file())
    except OSError as error:
        raise CheckpointError(f"cannot read {directory}: {reason_of(error)}") from error
    if len(found) != 1:
        names = ", ".join(shown_name(path.name) for path in found[:5]) or "none"
        raise CheckpointError(f"{directory} has no {CONFIG_FILE} and not one file of weights ({names}): give its path")
    return found[0]


def _own_directory(path: Path, fields: dict[str, Any]) -> Found:
    if fields["architecture"] != ARCHITECTURE:
        raise _other_architecture(path / CONFIG_FILE, fields["architecture"])
    file = RandomAccessFile(path / WEIGHTS_FILE)
    stored, _ = read_safetensors(file)
    read = _NumberReader(path / CONFIG_FILE, fields)
    hints = Hints(
        num_layers=read.size("num_layers"),
        width=read.size("width"),
        norm_eps=read.epsilon("norm_eps", Hints().norm_eps),
        head_norm_eps=read.epsilon("head_norm_eps", Hints().head_norm_eps),
    )
    return Found(
        path=path,
        directory=path,
        form="nsm",
        layout=OFFICIAL,
        stored=stored,
        hints=hints,
        modified=file.modified,
        fields=fields,
    )


def _hugging_face_directory(path: Path, fields: dict[str, Any]) -> Found:
    config_file = path / CONFIG_FILE
    names = fields.get("architectures")
    first = names[0] if isinstance(names, list) and names else fields.get("model_type")
    if first not in (HF_ARCHITECTURE, ARCHITECTURE):
        raise _other_architecture(config_file, first)
    if fields.get("attn") is not None or fields.get("hidden_act", "sqrelu") not in ("sqrelu", "relu2"):
        raise CheckpointError(f"{config_file}: layers of attention, or another hidden_act than sqrelu, are not served")
    read = _NumberReader(config_file, fields)
    norm_eps = read.epsilon("norm_eps", Hints().norm_eps)
    head_size = read.size("head_dim")
    stored, modified = _shards(path)
    hints = Hints(
        num_layers=read.size("num_hidden_layers"),
        width=read.size("hidden_size"),
        head_size=head_size,
        norm_eps=norm_eps,
        head_norm_eps=norm_eps * (head_size or 64),
        is_tied=fields.get("tie_word_embeddings") is True,
    )
    return Found(
        path=path,
        directory=path,
        form="Hugging Face",
        layout=_layout_of(path, stored),
        stored=stored,
        hints=hints,
        modified=modified,
        fields=fields,
    )


def _other_architecture(file: Path, name: object) -> CheckpointError:
    if not isinstance(name, str):
        return CheckpointError(f"{file} names no architecture")
    known = f"served are {HF_ARCHITECTURE} and {ARCHITECTURE}"
    return CheckpointError(f"{file}: the architecture is {name[:60]!r}; {known}")


@dataclasses.dataclass(frozen=True, slots=True)
class _NumberReader:
    """Numbers in a `config.json`; one that is no number ends with a CheckpointError."""

    path: Path
    fields: Mapping[str, Any]

    def size(self, name: str) -> int | None:
        value = self.fields.get(name)
        if value is not None and (type(value) is not int or not 0 < value < 1 << 31):
            raise CheckpointError(f"{self.path}: {name} must be a whole number above 0, got {str(value)[:40]}")
        return value

    def epsilon(self, name: str, default: float) -> float:
        value = self.fields.get(name, default)
        if type(value) not in (int, float) or not (math.isfinite(value) and 0 <= value < 1):
            raise CheckpointError(f"{self.path}: {name} must be a number from 0 to 1, got {str(value)[:40]}")
        return float(value)


def _shards(directory: Path) -> tuple[dict[str, StoredTensor], int]:
    """The tensors of a directory's weights, in one file or several, and the newest file's time."""
    for name in HF_WEIGHTS:
        if (directory / f"{name}.index.json").exists():
            return _indexed(directory, directory / f"{name}.index.json")
        if (directory / name).exists():
            file = RandomAccessFile(directory / name)
            return _reader_of(file)(file), file.modified
    raise CheckpointError(f"{directory} has neither {' nor '.join(HF_WEIGHTS)}, nor an index of parts")


def _indexed(directory: Path, index: Path) -> tuple[dict[str, StoredTensor], int]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{index} has no weight_map")
    names = set()
    for tensor, name in weight_map.items():
        # A part lies beside its index: a path elsewhere, or the index itself, is no part
        if not isinstance(name, str) or Path(name).name != name or Path(name).suffix not in WEIGHT_SUFFIXES:
            raise CheckpointError(f"{index}: the tensor {shown_name(tensor)} is in {str(name)[:80]!r}: no part's name")
        names.add(name)
    if len(names) > MAX_SHARDS:
        raise CheckpointError(f"{index} names {len(names)} parts, more than {MAX_SHARDS}")
    stored: dict[str, StoredTensor] = {}
    modified = 0
    for name in sorted(names):
        file = RandomAccessFile(directory / name)
        modified = max(modified, file.modified)
        for tensor, entry in _reader_of(file)(file).items():
            if weight_map.get(tensor) != name:
                raise entry.error(f"is in this part, and {index.name} does not say so")
            stored[tensor] = entry
    for tensor, name in weight_map.items():
        if tensor not in stored:
            raise CheckpointError(f"{directory / name}: the tensor {shown_name(tensor)} is missing")
    return stored, modified


def _reader_of(file: RandomAccessFile) -> Callable[[RandomAccessFile], dict[str, StoredTensor]]:
    if is_zip(file):
        return read_pytorch
    if is_safetensors(file):
        return lambda opened: read_safetensors(opened)[0]
    why = describe_foreign(file)
    raise CheckpointError(f"{file.path} is neither .safetensors nor a PyTorch file of tensors{why}")
