"""A stored state: one self-describing, checksummed string of bytes. No torch here.

Byte formats 1 and 2, all integers little endian:

    offset        bytes  what
    0             8      magic "NSMSNAP" and a zero byte
    8             4      format version
    12            4      H, length of the header
    16            8      S, length of the stored state
    24            H      header: JSON, ASCII, sorted keys, no blanks
    24 + H        S      state: the layout's tensors in order, in the header's `stored_dtype` (see quantize.py),
                         little endian, no padding. Format 2: those bytes, packed (see packing.py)
    24 + H + S    16     checksum over everything before: XXH3-128

The checksum finds damage and tells versions apart. A build refuses a format version that it does not know.
"""

from __future__ import annotations

import dataclasses
import json
import math
import struct
from collections.abc import Mapping
from typing import Any, NoReturn

from nsm_core.errors import NumericalError, SnapshotCorrupt
from nsm_core.hashing import CHECKSUM_BYTES, checksum
from nsm_core.state.checks import is_int, is_text, require
from nsm_core.state.layout import FLOAT
from nsm_core.state.layout import TensorLayout as TensorLayout
from nsm_core.state.layout import parse_layout as parse_layout
from nsm_core.state.packing import pack_state, unpack_state
from nsm_core.state.quantize import FORMATS, StateFormat, coarsest, decode_state, encode_state, stored_bytes

MAGIC = b"NSMSNAP\0"
FORMAT_VERSION = 1
PACKED_VERSION = 2

_PREFIX = struct.Struct("<8sIIQ")
_MAX_TOKEN_ID = 2**32 - 1  # the token log keeps 4 bytes a token
_MAX_COUNT = 2**63 - 1
_MAX_SEED = 2**64 - 1


def _is_amount(value: object) -> bool:
    return isinstance(value, float) and 0 <= value < math.inf


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SamplerState:
    """The sampler's memory from turn to turn: the session's seed and how often it sampled each token.

    Counts are checked where they are read: a turn makes thousands of them anew.
    """

    seed: int
    generated_counts: Mapping[int, int]

    def __post_init__(self) -> None:
        require(is_int(self.seed, 0, _MAX_SEED), f"seed {self.seed!r}")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotHeader:
    """The owner of a state, the model that made it, and its position.

    `position`: tokens fed to reach the state. `pending_id`: the token sampled but not yet fed, or None. `version`: the
    session's version this snapshot is; `parent`: the version it came from. `created_at`: unix seconds. `stored_dtype`:
    what the state's numbers are at rest, whatever `layout` says that they are while it runs; `rounded_to`: the coarsest
    dtype that this state, or one that it was computed from, was at rest in. float32: it is what its log makes it.
    `energy_joules`: of all turns that led here, as far as it was measured. `earlier_numerics`: the classes besides
    `numerics` that computed a part of what led here, in order of their names; not in the bytes where there are none.
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
    earlier_numerics: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self._is_usual():
            self._check()

    def _is_usual(self) -> bool:
        """Whether `_check` would pass, for nearly all that are made, at a part of its cost: each turn makes one."""
        texts = (self.model_fingerprint, self.numerics, self.tokenizer_fingerprint, self.tenant, self.session_id)
        return (
            all(type(text) is str and text for text in texts)
            and self.earlier_numerics == ()
            and type(self.stored_dtype) is type(self.rounded_to) is str
            and self.stored_dtype == self.rounded_to == FLOAT
            and type(self.position) is type(self.version) is type(self.parent) is int
            and 1 <= self.position <= _MAX_COUNT
            and 0 <= self.parent < self.version <= _MAX_COUNT
            and (self.pending_id is None or (type(self.pending_id) is int and 0 <= self.pending_id <= _MAX_TOKEN_ID))
            and type(self.created_at) is type(self.energy_joules) is float
            and 0 <= self.created_at < math.inf
            and 0 <= self.energy_joules < math.inf
        )

    def _check(self) -> None:
        """Raises SnapshotCorrupt."""
        for name in ("model_fingerprint", "numerics", "tokenizer_fingerprint", "tenant", "session_id"):
            value = getattr(self, name)
            require(is_text(value), f"{name} {value!r}")
        for value in self.earlier_numerics:
            require(is_text(value) and value != self.numerics, f"earlier numerics {value!r}")
        is_ordered = list(self.earlier_numerics) == sorted(set(self.earlier_numerics))
        require(is_ordered, "the earlier numerics are not in order")
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
        """Length of the stored state."""
        return stored_bytes(self.layout, self.stored_format)

    @property
    def stored_format(self) -> StateFormat:
        return FORMATS[self.stored_dtype]

    @property
    def rounding(self) -> StateFormat:
        """`rounded_to`; FP32 where there was none."""
        return FORMATS[self.rounded_to]

    def to_json(self) -> bytes:
        """Canonical: equal headers have equal bytes."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        if not self.earlier_numerics:
            del fields["earlier_numerics"]
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
        is_complete = isinstance(fields, dict) and set(fields) | {"earlier_numerics"} == names
        require(is_complete, "the header does not have the fields of its format")
        earlier = fields.get("earlier_numerics", [])
        require(isinstance(earlier, list), "the earlier numerics are not a list")
        fields["earlier_numerics"] = tuple(earlier)
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
        sampler = SamplerState(seed=fields["seed"], generated_counts=dict(fields["generated_counts"]))
    except (TypeError, KeyError, ValueError) as error:
        raise SnapshotCorrupt("snapshot refused: the sampler is not {seed, generated_counts}") from error
    for token_id, count in sampler.generated_counts.items():
        if not (is_int(token_id, 0, _MAX_TOKEN_ID) and is_int(count, 1, _MAX_COUNT)):
            raise SnapshotCorrupt(f"snapshot refused: count {count!r} of token {token_id!r}")
    return sampler


@dataclasses.dataclass(frozen=True, slots=True)
class Snapshot:
    """An immutable state: the header, and the tensors' bytes as they run (`StateSpec.pack`).

    `held`: the number under which an engine holds it instead. Then `state` is empty, and it cannot be encoded.
    """

    header: SnapshotHeader
    state: bytes
    held: int | None = None

    def __post_init__(self) -> None:
        want, got = self.header.state_bytes if self.held is None else 0, len(self.state)
        require(want == got, f"the layout has {want} bytes, the state {got}")

    def encode(self, *, is_packed: bool = False) -> bytes:
        """`encode_parts` in one piece; `is_packed`: the state without loss in fewer bytes, for some milliseconds."""
        if not is_packed:
            return b"".join(self.encode_parts())
        header, state = self._at_rest()
        return b"".join(_parts(PACKED_VERSION, header, pack_state(state)))

    def encode_parts(self) -> tuple[bytes, bytes, bytes]:
        """The byte format of this module's docstring: the state in the header's `stored_dtype`, or in float32 when its
        numbers do not fit into that.

        In parts, for callers that add bytes of their own: a copy of megabytes takes milliseconds.
        """
        return _parts(FORMAT_VERSION, *self._at_rest())

    def _at_rest(self) -> tuple[SnapshotHeader, bytes]:
        header = self.header
        if self.held is not None:
            raise ValueError("the engine holds this state: it must be fetched first")
        try:
            return header, encode_state(header.layout, self.state, header.stored_format)
        except NumericalError:  # a turn must not fail because a coarser dtype lacks the range
            return dataclasses.replace(header, stored_dtype=FLOAT), self.state

    @classmethod
    def decode(cls, raw: bytes | memoryview, *, is_verified: bool = False) -> Snapshot:
        """The inverse of `encode`, but for rounding. Raises SnapshotCorrupt, with the reason, for any other bytes.

        `is_verified`: `verify` accepted these bytes before; a second checksum over megabytes is left out.
        """
        header_end = _measure(raw) if is_verified else verify(raw)
        header = SnapshotHeader.from_json(bytes(raw[_PREFIX.size : header_end]))
        rest = memoryview(raw)[header_end:-CHECKSUM_BYTES]
        is_packed = _PREFIX.unpack_from(raw)[1] == PACKED_VERSION
        stored = unpack_state(rest, num_bytes=header.stored_bytes) if is_packed else bytes(rest)
        return cls(header, decode_state(header.layout, stored, header.stored_format))


def _parts(version: int, header: SnapshotHeader, state: bytes) -> tuple[bytes, bytes, bytes]:
    raw_header = header.to_json()
    start = _PREFIX.pack(MAGIC, version, len(raw_header), len(state)) + raw_header
    return start, state, checksum(start, state)


def replace_header(raw: bytes, header: SnapshotHeader) -> bytes:
    """The snapshot `raw`, which `Snapshot.decode` accepts, under another header of the same layout and dtypes.

    The state's bytes stay as they are, packed or not.
    """
    _, version, _, _ = _PREFIX.unpack_from(raw)
    return b"".join(_parts(version, header, raw[_measure(raw) : -CHECKSUM_BYTES]))


def verify(raw: bytes | memoryview) -> int:
    """Checks magic, format version, length and checksum; returns the offset of the state. Raises SnapshotCorrupt."""
    header_end = _measure(raw)
    require(checksum(memoryview(raw)[:-CHECKSUM_BYTES]) == raw[-CHECKSUM_BYTES:], "the checksum does not match")
    return header_end


def _measure(raw: bytes | memoryview) -> int:
    """The checks of `verify` without the checksum."""
    require(len(raw) >= _PREFIX.size + CHECKSUM_BYTES, f"{len(raw)} bytes are too few")
    magic, version, header_bytes, state_bytes = _PREFIX.unpack_from(raw)
    require(magic == MAGIC, "this is not a snapshot (magic bytes)")
    is_known = version in (FORMAT_VERSION, PACKED_VERSION)
    require(is_known, f"format version {version}, this build reads versions {FORMAT_VERSION} and {PACKED_VERSION}")
    want = _PREFIX.size + header_bytes + state_bytes + CHECKSUM_BYTES
    require(len(raw) == want, f"{want} bytes expected, got {len(raw)}")
    return int(_PREFIX.size + header_bytes)
