"""Which paths are RWKV-7's, told without its other modules: a server of another architecture needs none of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from nsm_core.errors import CheckpointError, NsmError
from nsm_core.formats.random_access import RandomAccessFile

ARCHITECTURE = "rwkv7"
CONFIG_FILE = "config.json"
WEIGHTS_FILE = "weights.safetensors"
WEIGHT_SUFFIXES = (".pth", ".pt", ".bin", ".safetensors", ".st", ".gguf")
MAX_JSON_BYTES = 8 << 20


def claims(path: Path) -> bool:
    """Whether this module opens the path, or has the best message for one that no module opens. Never raises.

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


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises CheckpointError."""
    file = RandomAccessFile(path)
    if file.size > MAX_JSON_BYTES:
        raise CheckpointError(f"{path} has {file.size} bytes, more than {MAX_JSON_BYTES}")
    try:
        fields = json.loads(file.read(0, file.size))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} holds no JSON: {type(error).__name__}") from error
    if not isinstance(fields, dict):
        raise CheckpointError(f"{path} must hold one JSON object")
    return fields
