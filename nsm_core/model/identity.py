"""Files of a model directory and the fingerprint over them. No torch here: commands that compute nothing use it."""

from __future__ import annotations

import json
import os
from pathlib import Path

from nsm_core.config import TOKENIZER_FILE, canonical_json, read_fields
from nsm_core.errors import CheckpointError, NsmError, reason_of
from nsm_core.hashing import Hash, new_identity

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "weights.safetensors"
PIECE_BYTES = 256 * 1024


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
            if name == CONFIG_FILE:
                raw = canonical_json(read_fields(file)).encode()
                digest.update(_head(name, len(raw)) + raw)
            else:
                _add_file(digest, file)
        except OSError as error:
            raise CheckpointError(f"cannot read {file}: {reason_of(error)}") from error
    return digest.hexdigest()


def _add_file(digest: Hash, file: Path) -> None:
    """Piece by piece: weights would take as much memory again, which the system clears first."""
    piece = memoryview(bytearray(PIECE_BYTES))
    with file.open("rb", buffering=0) as opened:
        digest.update(_head(file.name, os.fstat(opened.fileno()).st_size))
        while num_bytes := opened.readinto(piece):
            digest.update(piece[:num_bytes])


def _head(name: str, num_bytes: int) -> bytes:
    return json.dumps([name, num_bytes]).encode()
