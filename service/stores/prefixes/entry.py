"""An entry's bytes: the ids, and a snapshot of the state after them.

    offset   bytes  what
    0        4      N, number of ids, little endian
    4        4N     the ids, 4 bytes each, little endian
    4 + 4N   rest   the snapshot (nsm_core/state/snapshot.py), whose session id is the entry's digest

A digest finds an entry; only the ids in it prove that it is the right one.
"""

from __future__ import annotations

from nsm_core.engine.request import Resume
from nsm_core.errors import SnapshotCorrupt
from nsm_core.model_info import ModelInfo
from nsm_core.state.quantize import StateFormat
from nsm_core.state.snapshot import SamplerState, Snapshot, SnapshotHeader
from nsm_core.tokenizer import Tokenizer
from service.stores.prefixes.base import PrefixKey
from service.stores.prefixes.keys import ID_BYTES

COUNT_BYTES = 4
NO_SAMPLER = SamplerState(seed=0, generated_counts={})  # a stateless request draws and counts for itself


def encode_entry(
    *,
    tenant: str,
    key: PrefixKey,
    raw_ids: bytes,
    state: bytes,
    model: ModelInfo,
    tokenizer: Tokenizer,
    created_at: float,
    state_format: StateFormat = StateFormat.FP32,
) -> bytes:
    """`raw_ids`: the `key.position` ids as `encode_ids` wrote them; `state`: the state after them, stored in
    `state_format`.
    """
    header = SnapshotHeader(
        model_fingerprint=model.fingerprint,
        numerics=model.numerics,
        tokenizer_fingerprint=tokenizer.fingerprint,
        layout=model.state_layout,
        stored_dtype=state_format.dtype,
        rounded_to=state_format.dtype,
        position=key.position,
        pending_id=None,
        sampler=NO_SAMPLER,
        tenant=tenant,
        session_id=key.digest,
        version=1,
        parent=0,
        created_at=created_at,
    )
    count = (len(raw_ids) // ID_BYTES).to_bytes(COUNT_BYTES, "little")
    return b"".join((count, raw_ids, *Snapshot(header, state).encode_parts()))


def decode_entry(
    entry: bytes, *, tenant: str, key: PrefixKey, raw_ids: bytes, model: ModelInfo, tokenizer: Tokenizer
) -> Resume:
    """The state that a prompt starts from when it begins with `raw_ids`.

    Raises SnapshotCorrupt for damage, and for anything that was not stored for exactly this purpose: other ids, another
    tenant, place, model or numerics class. The message repeats no stored text.
    """
    ids_end = COUNT_BYTES + len(raw_ids)
    count = int.from_bytes(entry[:COUNT_BYTES], "little")
    if count != key.position or entry[COUNT_BYTES:ids_end] != raw_ids:
        raise SnapshotCorrupt("the prefix stored under this digest has other ids")
    snapshot = Snapshot.decode(memoryview(entry)[ids_end:])
    header = snapshot.header
    expected = {
        "tenant": tenant,
        "session_id": key.digest,
        "position": key.position,
        "model_fingerprint": model.fingerprint,
        "numerics": model.numerics,
        "tokenizer_fingerprint": tokenizer.fingerprint,
        "layout": model.state_layout,
        "pending_id": None,
    }
    for name, value in expected.items():
        if getattr(header, name) != value:
            raise SnapshotCorrupt(f"the prefix stored under this digest has another {name}")
    return Resume(
        state=snapshot.state,
        position=header.position,
        fingerprint=header.model_fingerprint,
        generated_counts={},
    )
