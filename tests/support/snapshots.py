"""Snapshots for tests that need one but no model."""

from __future__ import annotations

import hashlib
from typing import Any

from nsm_core.state.snapshot import SamplerState, Snapshot, SnapshotHeader, TensorLayout


def make_snapshot(*, session_id: str = "s1", version: int = 1, num_floats: int = 16, **changes: Any) -> Snapshot:
    """A valid snapshot whose state bytes differ from session to session and from version to version."""
    pattern = hashlib.blake2b(f"{session_id}/{version}".encode(), digest_size=64).digest()
    fields: dict[str, Any] = {
        "model_fingerprint": "m1",
        "numerics": "cpu",
        "tokenizer_fingerprint": "t1",
        "layout": (TensorLayout("slots", (num_floats,), "float32"),),
        "position": 3 * version,
        "pending_id": None,
        "sampler": SamplerState(seed=1, generated_counts={}),
        "tenant": "default",
        "session_id": session_id,
        "version": version,
        "parent": version - 1,
        "created_at": 1.0,
    }
    state = (pattern * (num_floats * 4 // len(pattern) + 1))[: num_floats * 4]
    return Snapshot(SnapshotHeader(**{**fields, **changes}), state)
