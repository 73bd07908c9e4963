"""Opens RWKV-7 models as people have them: files of any layout, with their tokenizer and chat template."""

from __future__ import annotations

from pathlib import Path

from nsm_core.errors import CheckpointError, NsmError
from nsm_core.rwkv7.chat import choose_template
from nsm_core.rwkv7.files import Rwkv7Files
from nsm_core.rwkv7.finding import ARCHITECTURE, CONFIG_FILE, WEIGHT_SUFFIXES, WEIGHTS_FILE, find_files, read_json
from nsm_core.rwkv7.reading import ModelTensors
from nsm_core.rwkv7.vocabulary import find_tokenizer


def claims(path: Path) -> bool:
    """Whether this module opens what is at the path, or says best why nothing can. Never raises.

    It takes every file, for models of other architectures are directories, and directories that are no other model's.
    """
    if not path.is_dir():
        return path.is_file()
    try:
        if not (path / CONFIG_FILE).exists():
            return any(entry.suffix in WEIGHT_SUFFIXES and entry.name != WEIGHTS_FILE for entry in path.iterdir())
        fields = read_json(path / CONFIG_FILE)
    except (OSError, NsmError):
        return False
    return fields.get("architecture") == ARCHITECTURE or "architectures" in fields or "model_type" in fields


def open_files(path: Path) -> Rwkv7Files:
    """Checks every tensor's name and shape; reads none but for the fingerprint.

    Raises CheckpointError, one line that names file and tensor.
    """
    found = find_files(path)
    tensors = ModelTensors(path, found.stored, found.layout, found.hints)
    tokenizer = find_tokenizer(found, tensors.config.vocab_size)
    if tokenizer.vocab_size > tensors.config.vocab_size:
        raise CheckpointError(
            f"{path}: the tokenizer has {tokenizer.vocab_size} tokens, "
            f"the tensor emb.weight only {tensors.config.vocab_size} rows"
        )
    return Rwkv7Files(
        config=tensors.config,
        tensors=tensors,
        tokenizer=tokenizer,
        chat_template=choose_template(found).text,
        weight_format=tensors.weight_format,
        fingerprint=tensors.fingerprint(tokenizer.fingerprint),
        name=path.resolve().name if path.is_dir() else path.stem,
        created=found.modified,
    )
