"""A stored state: one self-describing, checksummed string of bytes. No torch here.

Byte formats 1 to 16, all integers little endian:

    offset        bytes  what
    0             8      magic "NSMSNAP" and a zero byte
    8             4      format version
    12            4      H, length of the header
    16            8      S, length of the state as it stands here
    24            H      header: JSON, ASCII, sorted keys, no blanks
    24 + H        S      state: the layout's tensors in order, little endian, no padding;
                         packed, see packing.py, in the formats that have 1 added;
                         in the header's `stored_dtype`, see quantize.py, and with `rounded_to` in the header, in those
                         that have 2 added; with `energy_joules` in the header in those that have 4 added
    24 + H + S    32     checksum over everything before: blake2b-256 in formats 1 to 8; in those that have 8 added
                         16 zero bytes and xxh3-128

9 and what is added to it is written, all are read: an older snapshot is held against the checksum of its own format. A
build refuses the formats that it does not know. The checksum finds damage and tells versions apart. It has no key, so
whatever it were, who can write to the store could make it anew; and XXH3 takes a sixtieth of BLAKE2b's time.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import struct
from collections.abc import Mapping
from typing import Any, NoReturn

import xxhash

from nsm_core.errors import NumericalError, SnapshotCorrupt
from nsm_core.state.checks import is_int, is_text, require
from nsm_core.state.layout import FLOAT
from nsm_core.state.layout import TensorLayout as TensorLayout
from nsm_core.state.layout import parse_layout as parse_layout
from nsm_core.state.packing import pack, unpack
from nsm_core.state.quantize import FORMATS, StateFormat, coarsest, decode_state, encode_state, stored_bytes

MAGIC = b"NSMSNAP\0"
FORMAT_VERSION = 1
PACKED, ROUNDED, METERED, XXH3 = 1, 2, 4, 8  # added to the version
NEWEST_VERSION = FORMAT_VERSION + PACKED + ROUNDED + METERED + XXH3

_PREFIX = struct.Struct("<8sIIQ")
_CHECKSUM_BYTES = 32
_MAX_TOKEN_ID = 2**32 - 1  # the token log keeps 4 bytes a token
_MAX_COUNT = 2**63 - 1
_MAX_SEED = 2**64 - 1


def _is_amount(value: object) -> bool:
    return isinstance(value, float) and 0 <= value < math.inf


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SamplerState:
    """What the sampler carries from turn to turn: the session's seed and how often it sampled each token."""

    seed: int
    generated_counts: Mapping[int, int]

    def __post_init__(self) -> None:
        require(is_int(self.seed, 0, _MAX_SEED), f"seed {self.seed!r}")
        for token_id, count in self.generated_counts.items():
            valid = is_int(token_id, 0, _MAX_TOKEN_ID) and is_int(count, 1, _MAX_COUNT)
            require(valid, f"count {count!r} of token {token_id!r}")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotHeader:
    """Whose state it is, what made it, and where it stands.

    `position`: tokens fed to reach the state. `pending_id`: the token sampled but not yet fed, or None. `version`: the
    session's version this snapshot is; `parent`: the version it came from. `created_at`: unix seconds. `stored_dtype`:
    what the state's numbers are at rest, whatever `layout` says that they are while it runs; `rounded_to`: the coarsest
    dtype that this state, or one that it was computed from, was at rest in. float32: it is what its log makes it.
    `energy_joules`: of all turns that led here, as far as it was measured.
    """

    model_fingerprint: str
    numerics: str
    tokenizer_fingerprint: str
    layout: tuple[TensorLayout, ...]
    stored_dtype: str = FLOAT
    rounded_to: str = FLOAT
    position: int
    pending_id: int | None
    sampler: SamplerState
    tenant: str
    session_id: str
    version: int
    parent: int
    created_at: float
    energy_joules: float = 0.0

    def __post_init__(self) -> None:
        for name in ("model_fingerprint", "numerics", "tokenizer_fingerprint", "tenant", "session_id"):
            value = getattr(self, name)
            require(is_text(value), f"{name} {value!r}")
        for name in ("stored_dtype", "rounded_to"):
            value = getattr(self, name)
            is_known = is_text(value) and value in FORMATS
            require(is_known, f"{name} {value!r}, this build reads {', '.join(FORMATS)}")
        is_noted = coarsest(self.stored_format, self.rounding) is self.rounding
        require(is_noted, f"a state in {self.stored_dtype} that was rounded to {self.rounded_to}")
        require(is_int(self.position, 1, _MAX_COUNT), f"position {self.position!r}")
        valid_pending = self.pending_id is None or is_int(self.pending_id, 0, _MAX_TOKEN_ID)
        require(valid_pending, f"pending token {self.pending_id!r}")
        require(is_int(self.version, 1, _MAX_COUNT), f"version {self.version!r}")
        require(is_int(self.parent, 0, self.version - 1), f"parent {self.parent!r} of version {self.version}")
        require(_is_amount(self.created_at), f"date {self.created_at!r}")
        require(_is_amount(self.energy_joules), f"energy {self.energy_joules!r}")

    @property
    def state_bytes(self) -> int:
        """Length of a state of this layout while it runs."""
        return sum(tensor.num_bytes for tensor in self.layout)

    @property
    def stored_bytes(self) -> int:
        """The same at rest, unpacked."""
        return stored_bytes(self.layout, self.stored_format)

    @property
    def stored_format(self) -> StateFormat:
        return FORMATS[self.stored_dtype]

    @property
    def rounding(self) -> StateFormat:
        """`rounded_to`; FP32 where there was none."""
        return FORMATS[self.rounded_to]

    def to_json(self) -> bytes:
        """Canonical: equal headers have equal bytes. Without `rounded_to` where there was no rounding, and without
        `energy_joules` where none was measured.
        """
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        if self.rounding is StateFormat.FP32:
            del fields["rounded_to"]
        if not self.energy_joules:
            del fields["energy_joules"]
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
        is_complete = isinstance(fields, dict) and set(fields) | {"rounded_to", "energy_joules"} == names
        require(is_complete, "the header does not have the fields of its format")
        require(isinstance(fields["layout"], list), "the layout is not a list")
        fields["layout"] = parse_layout(fields["layout"])
        fields["sampler"] = _parse_sampler(fields["sampler"])
        header = cls(**fields)
        require(header.to_json() == raw, "the header is not in its canonical form")
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
    """An immutable state off the device: the header, and the tensors' bytes as they run (`StateSpec.pack`)."""

    header: SnapshotHeader
    state: bytes

    def __post_init__(self) -> None:
        want, got = self.header.state_bytes, len(self.state)
        require(want == got, f"the layout has {want} bytes, the state {got}")

    def encode(self, *, is_packed: bool = False) -> bytes:
        """`encode_parts` in one piece."""
        return b"".join(self.encode_parts(is_packed=is_packed))

    def encode_parts(self, *, is_packed: bool = False) -> tuple[bytes, bytes, bytes]:
        """The byte format of this module's docstring: the state in the header's `stored_dtype`, or in float32 when its
        numbers do not fit into that; packed where that is wished and shorter.

        Packing 2 MB takes about 10 ms, and unpacking the same: for states that are rarely read. In parts, for whoever
        puts something around them: a copy of megabytes takes milliseconds.
        """
        header, state = self._at_rest()
        packed = pack(state, word_bytes=header.stored_format.word_bytes) if is_packed else None
        version = FORMAT_VERSION + XXH3 + _additions(header)
        if packed is not None:
            version, state = version + PACKED, packed
        raw_header = header.to_json()
        beginning = _PREFIX.pack(MAGIC, version, len(raw_header), len(state)) + raw_header
        return beginning, state, _checksum(version, beginning, state)

    def _at_rest(self) -> tuple[SnapshotHeader, bytes]:
        header = self.header
        try:
            return header, encode_state(header.layout, self.state, header.stored_format)
        except NumericalError:  # a turn is not lost for want of a coarser number
            return dataclasses.replace(header, stored_dtype=FLOAT), self.state

    @classmethod
    def decode(cls, raw: bytes | memoryview, *, is_verified: bool = False) -> Snapshot:
        """Reads what `encode` wrote, to the state as it was rounded. Raises SnapshotCorrupt, with the reason, for
        anything else.

        `is_verified`: `verify` accepted these bytes before; over megabytes a second checksum takes milliseconds.
        """
        header_end = _measure(raw) if is_verified else verify(raw)
        header = SnapshotHeader.from_json(bytes(raw[_PREFIX.size : header_end]))
        at_rest, form = memoryview(raw)[header_end:-_CHECKSUM_BYTES], header.stored_format
        version = _PREFIX.unpack_from(raw)[1]
        additions = version - FORMAT_VERSION
        is_fitting = additions & ROUNDED == _additions(header) & ROUNDED
        require(is_fitting, f"a state that was rounded to {header.rounded_to} in format version {version}")
        is_fitting = additions & METERED == _additions(header) & METERED
        require(is_fitting, f"a state that cost {header.energy_joules:g} J in format version {version}")
        if additions & PACKED:
            state = unpack(at_rest, header.stored_bytes, word_bytes=form.word_bytes)
        else:
            state = bytes(at_rest)
        return cls(header, decode_state(header.layout, state, form))


def _additions(header: SnapshotHeader) -> int:
    """What a header adds to the format version."""
    rounded = 0 if header.rounding is StateFormat.FP32 else ROUNDED
    return rounded + (METERED if header.energy_joules else 0)


def verify(raw: bytes | memoryview) -> int:
    """Checks magic, format version, length and checksum; returns where the state begins. Raises SnapshotCorrupt."""
    header_end = _measure(raw)
    version = _PREFIX.unpack_from(raw)[1]
    checksum = _checksum(version, memoryview(raw)[:-_CHECKSUM_BYTES])
    require(checksum == raw[-_CHECKSUM_BYTES:], "the checksum does not match")
    return header_end


def _measure(raw: bytes | memoryview) -> int:
    """What `verify` checks, but for the checksum."""
    require(len(raw) >= _PREFIX.size + _CHECKSUM_BYTES, f"{len(raw)} bytes are too few")
    magic, version, header_bytes, state_bytes = _PREFIX.unpack_from(raw)
    require(magic == MAGIC, "this is not a snapshot (magic bytes)")
    is_known = FORMAT_VERSION <= version <= NEWEST_VERSION
    require(is_known, f"format version {version}, this build reads up to {NEWEST_VERSION}")
    want = _PREFIX.size + header_bytes + state_bytes + _CHECKSUM_BYTES
    require(len(raw) == want, f"{want} bytes expected, got {len(raw)}")
    return int(_PREFIX.size + header_bytes)


def _checksum(version: int, *parts: bytes | memoryview) -> bytes:
    """The one of the format, always as long: stores know a snapshot by its last bytes."""
    is_fast = (version - FORMAT_VERSION) & XXH3
    digest = xxhash.xxh3_128() if is_fast else hashlib.blake2b(digest_size=_CHECKSUM_BYTES)
    for part in parts:
        digest.update(part)
    return digest.digest().rjust(_CHECKSUM_BYTES, b"\0")
