"""A stored state: one self-describing, checksummed string of bytes. No torch here.

Byte formats 1 and 2, all integers little endian:

    offset        bytes  what
    0             8      magic "NSMSNAP" and a zero byte
    8             4      format version
    12            4      H, length of the header
    16            8      S, length of the state as it stands here
    24            H      header: JSON, ASCII, sorted keys, no blanks
    24 + H        S      state: the layout's tensors in order, little endian, no padding;
                         in format 2 packed, see packing.py
    24 + H + S    32     blake2b-256 over everything before
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import struct
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

from nsm_core.errors import SnapshotCorrupt
from nsm_core.state.packing import pack, unpack

MAGIC = b"NSMSNAP\0"
FORMAT_VERSION = 1
PACKED_VERSION = 2
STORED_DTYPE = "float32"

_PREFIX = struct.Struct("<8sIIQ")
_CHECKSUM_BYTES = 32
_DTYPE_BYTES = {"float32": 4, "int64": 8}
_MAX_TOKEN_ID = 2**32 - 1  # the token log keeps 4 bytes a token
_MAX_COUNT = 2**63 - 1
_MAX_DIMS = 8
_MAX_SEED = 2**64 - 1


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise SnapshotCorrupt(f"snapshot refused: {message}")


def _is_int(value: object, low: int, high: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _is_date(value: object) -> bool:
    return isinstance(value, float) and 0 <= value < math.inf


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value)


@dataclasses.dataclass(frozen=True, slots=True)
class TensorLayout:
    """One tensor of a stored state: what `StateSpec.layout` says about it."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    def __post_init__(self) -> None:
        _require(_is_text(self.name), f"tensor name {self.name!r}")
        _require(_is_text(self.dtype) and self.dtype in _DTYPE_BYTES, f"dtype {self.dtype!r} of {self.name}")
        valid_shape = len(self.shape) <= _MAX_DIMS and all(_is_int(size, 1, 2**31) for size in self.shape)
        _require(valid_shape, f"shape {self.shape} of {self.name}")

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * _DTYPE_BYTES[self.dtype]


def parse_layout(tensors: Iterable[Mapping[str, Any]]) -> tuple[TensorLayout, ...]:
    """`StateSpec.layout()` as comparable values; raises SnapshotCorrupt for anything else."""
    return tuple(_parse_tensor(tensor) for tensor in tensors)


def _parse_tensor(fields: Mapping[str, Any]) -> TensorLayout:
    try:
        name, shape, dtype = fields["name"], tuple(fields["shape"]), fields["dtype"]
    except (TypeError, KeyError) as error:
        raise SnapshotCorrupt("snapshot refused: a tensor's layout is not {name, shape, dtype}") from error
    return TensorLayout(name, shape, dtype)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SamplerState:
    """What the sampler carries from turn to turn: the session's seed and how often it sampled each token."""

    seed: int
    generated_counts: Mapping[int, int]

    def __post_init__(self) -> None:
        _require(_is_int(self.seed, 0, _MAX_SEED), f"seed {self.seed!r}")
        for token_id, count in self.generated_counts.items():
            valid = _is_int(token_id, 0, _MAX_TOKEN_ID) and _is_int(count, 1, _MAX_COUNT)
            _require(valid, f"count {count!r} of token {token_id!r}")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotHeader:
    """Whose state it is, what made it, and where it stands.

    `position`: tokens fed to reach the state. `pending_id`: the token sampled but not yet fed, or None. `version`: the
    session's version this snapshot is; `parent`: the version it came from. `created_at`: unix seconds.
    """

    model_fingerprint: str
    numerics: str
    tokenizer_fingerprint: str
    layout: tuple[TensorLayout, ...]
    stored_dtype: str = STORED_DTYPE
    position: int
    pending_id: int | None
    sampler: SamplerState
    tenant: str
    session_id: str
    version: int
    parent: int
    created_at: float

    def __post_init__(self) -> None:
        for name in ("model_fingerprint", "numerics", "tokenizer_fingerprint", "tenant", "session_id"):
            value = getattr(self, name)
            _require(_is_text(value), f"{name} {value!r}")
        _require(self.stored_dtype == STORED_DTYPE, f"stored dtype {self.stored_dtype!r}, this build reads float32")
        _require(_is_int(self.position, 1, _MAX_COUNT), f"position {self.position!r}")
        valid_pending = self.pending_id is None or _is_int(self.pending_id, 0, _MAX_TOKEN_ID)
        _require(valid_pending, f"pending token {self.pending_id!r}")
        _require(_is_int(self.version, 1, _MAX_COUNT), f"version {self.version!r}")
        _require(_is_int(self.parent, 0, self.version - 1), f"parent {self.parent!r} of version {self.version}")
        _require(_is_date(self.created_at), f"date {self.created_at!r}")

    @property
    def state_bytes(self) -> int:
        """Length of a state of this layout."""
        return sum(tensor.num_bytes for tensor in self.layout)

    def to_json(self) -> bytes:
        """Canonical: equal headers have equal bytes."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        fields["layout"] = [dataclasses.asdict(tensor) for tensor in self.layout]
        fields["sampler"] = {
            "seed": self.sampler.seed,
            "generated_counts": sorted(self.sampler.generated_counts.items()),
        }
        return json.dumps(fields, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")

    @classmethod
    def from_json(cls, raw: bytes) -> SnapshotHeader:
        """The inverse of `to_json`; raises SnapshotCorrupt for anything it would not have written."""
        try:
            fields = json.loads(raw, parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as error:
            raise SnapshotCorrupt("snapshot refused: the header is not JSON") from error
        names = {field.name for field in dataclasses.fields(cls)}
        _require(isinstance(fields, dict) and set(fields) == names, "the header does not have the fields of its format")
        _require(isinstance(fields["layout"], list), "the layout is not a list")
        fields["layout"] = parse_layout(fields["layout"])
        fields["sampler"] = _parse_sampler(fields["sampler"])
        header = cls(**fields)
        _require(header.to_json() == raw, "the header is not in its canonical form")
        return header


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _parse_sampler(fields: Any) -> SamplerState:
    try:
        return SamplerState(seed=fields["seed"], generated_counts=dict(fields["generated_counts"]))
    except (TypeError, KeyError, ValueError) as error:
        raise SnapshotCorrupt("snapshot refused: the sampler is not {seed, generated_counts}") from error


@dataclasses.dataclass(frozen=True, slots=True)
class Snapshot:
    """An immutable state off the device: the header, and the tensors' bytes (`StateSpec.pack`)."""

    header: SnapshotHeader
    state: bytes

    def __post_init__(self) -> None:
        want, got = self.header.state_bytes, len(self.state)
        _require(want == got, f"the layout has {want} bytes, the state {got}")

    def encode(self, *, is_packed: bool = False) -> bytes:
        """The byte format of this module's docstring: the first, or the packed one where that is shorter.

        Packing 2 MB takes about 10 ms, and unpacking the same: for states that are rarely read.
        """
        packed = pack(self.state) if is_packed else None
        version, state = (FORMAT_VERSION, self.state) if packed is None else (PACKED_VERSION, packed)
        header = self.header.to_json()
        body = _PREFIX.pack(MAGIC, version, len(header), len(state)) + header + state
        return body + _checksum(body)

    @classmethod
    def decode(cls, raw: bytes, *, is_verified: bool = False) -> Snapshot:
        """Reads what `encode` wrote. Raises SnapshotCorrupt, with the reason, for anything else.

        `is_verified`: `verify` accepted these bytes before; over megabytes a second checksum takes milliseconds.
        """
        header_end = _measure(raw) if is_verified else verify(raw)
        header = SnapshotHeader.from_json(raw[_PREFIX.size : header_end])
        state = raw[header_end:-_CHECKSUM_BYTES]
        if _PREFIX.unpack_from(raw)[1] == PACKED_VERSION:
            state = unpack(state, header.state_bytes)
        return cls(header, state)


def verify(raw: bytes) -> int:
    """Checks magic, format version, length and checksum; returns where the state begins. Raises SnapshotCorrupt."""
    header_end = _measure(raw)
    checksum = _checksum(memoryview(raw)[:-_CHECKSUM_BYTES])
    _require(checksum == raw[-_CHECKSUM_BYTES:], "the checksum does not match")
    return header_end


def _measure(raw: bytes) -> int:
    """What `verify` checks, but for the checksum."""
    _require(len(raw) >= _PREFIX.size + _CHECKSUM_BYTES, f"{len(raw)} bytes are too few")
    magic, version, header_bytes, state_bytes = _PREFIX.unpack_from(raw)
    _require(magic == MAGIC, "this is not a snapshot (magic bytes)")
    is_known = version in (FORMAT_VERSION, PACKED_VERSION)
    _require(is_known, f"format version {version}, this build reads up to {PACKED_VERSION}")
    want = _PREFIX.size + header_bytes + state_bytes + _CHECKSUM_BYTES
    _require(len(raw) == want, f"{want} bytes expected, got {len(raw)}")
    return int(_PREFIX.size + header_bytes)


def _checksum(body: bytes | memoryview) -> bytes:
    return hashlib.blake2b(body, digest_size=_CHECKSUM_BYTES).digest()
