"""What is stored beside a state's bytes, as JSON."""

from __future__ import annotations

import json
from typing import Any

from service.stores.sessions.codec import decoding
from service.stores.states.base import NamedState, NewState


def num_bytes_of(state: NewState) -> int:
    """What it takes of a quota."""
    return len(state.file) + len((state.text or "").encode())


def encode_fields(state: NewState, *, created_at: float) -> str:
    fields: dict[str, Any] = {
        "created_at": created_at,
        "model_fingerprint": state.model_fingerprint,
        "position": state.position,
        "num_tokens": state.num_tokens,
        "num_bytes": num_bytes_of(state),
        "source": state.source,
        "metadata": dict(state.metadata),
    }
    return json.dumps(fields, separators=(",", ":"))


def decode_fields(tenant: str, name: str, version: int, raw: str | bytes) -> NamedState:
    """Raises SnapshotCorrupt."""
    with decoding(f"the fields of state {name!r}"):
        return NamedState(tenant=tenant, name=name, version=version, **json.loads(raw))
