"""Files of a model directory and the fingerprint over them. No torch here: commands that compute nothing use it."""

from __future__ import annotations

import json
from pathlib import Path

from nsm_core.config import TOKENIZER_FILE, canonical_json, read_fields
from nsm_core.errors import CheckpointError, NsmError, reason_of
from nsm_core.hashing import new_identity

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "weights.safetensors"


def is_nsm(directory: Path) -> bool:
    """Whether these are certainly files of this package's architecture; never raises."""
    try:
        return "layer_pattern" in read_fields(directory / CONFIG_FILE)
    except (OSError, NsmError):
        return False


def fingerprint(directory: Path) -> str:
    """SHA-256 over config, weights and tokenizer: two models with equal fingerprints give equal logits."""
    digest = new_identity()
    for name in (CONFIG_FILE, WEIGHTS_FILE, TOKENIZER_FILE):
        file = directory / name
        try:
            # The config is hashed by its fields: its layout on disk does not matter.
            raw = canonical_json(read_fields(file)).encode() if name == CONFIG_FILE else file.read_bytes()
        except OSError as error:
            raise CheckpointError(f"cannot read {file}: {reason_of(error)}") from error
        digest.update(json.dumps([name, len(raw)]).encode())
        digest.update(raw)
    return digest.hexdigest()
