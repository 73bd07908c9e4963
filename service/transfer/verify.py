"""Stored states held against their token logs: each is derived again under the running model and compared.

Writes nothing and takes no lease: a session is judged as of one of its commits, whatever turns run meanwhile.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from nsm_core.errors import EngineDead, NotFound, NsmError, NumericalError, SessionBusy, SnapshotCorrupt
from nsm_core.state.layout import FLOAT, TensorLayout
from nsm_core.state.quantize import StateFormat
from nsm_core.state.snapshot import Snapshot
from service.backends.base import InferenceBackend
from service.state.copies import SessionCopy, read_copy
from service.state.prefill import read_again
from service.state.rebuild import sampled_counts, seed_of
from service.stores.sessions.base import LogMark, SessionStore
from service.stores.sessions.key import SessionKey
from service.transfer.damage import NEW_STORE, damage_of

# What chunks, single steps and batches of one numerics class may differ by; where states were rounded when they were
# stored, what that adds up to over the turns of a session, as a share of a whole tensor. Slots that hardly fade keep
# every rounding. The bundled model after 1,000 turns: 0.005 in fp16, 0.03 in int8; unrounded never more than 9e-5.
TOLERANCES = {StateFormat.FP32: 1e-3, StateFormat.FP16: 5e-2, StateFormat.INT8: 2e-1}

_SMALLEST = 1e-9  # of a length to divide by: a tensor of zeros is compared as it is

FloatArray = NDArray[np.float64]
Verdict = Literal[
    "same", "empty", "no_state", "diverged", "several_numerics", "other_numerics", "damaged", "other_model",
    "other_tokenizer", "busy", "gone",
]  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class Divergence:
    """A difference between the stored session and its log.

    `what`: a tensor of the state, or "position", "log_length", "pending_token", "penalty_counts", "seed", "marks",
    "layout" or a field of the snapshot's header. `difference`: of a tensor, see `Verified`; else None.
    `is_of_numbers`: a tensor of floats, all of them finite, so that another numerics class may be the reason.
    """

    what: str
    detail: str
    difference: float | None = None
    is_of_numbers: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """The findings of one session. `no_state`: it has a log and no snapshot that could be compared with it.

    `num_log_tokens`: how many were read again. `rounding`: the coarsest format that the state, or one before it, was
    stored in; None where it was not compared. `difference`: the largest of any tensor, see `compare_states`.
    `numerics`: the class that made the state, where it is not the running one: then numbers may differ by more. So they
    may with `earlier_numerics`: other classes than `numerics` that computed a part of what led to it.
    `several_numerics`, `other_numerics`: several classes or another one made it, and only its numbers differ by more
    than the tolerance, which does not hold between classes.
    `damage`: the part that cannot be read, and the reason.
    """

    name: SessionKey
    verdict: Verdict
    num_log_tokens: int = 0
    rounding: StateFormat | None = None
    difference: float = 0.0
    divergences: tuple[Divergence, ...] = ()
    numerics: str | None = None
    earlier_numerics: tuple[str, ...] = ()
    damage: NsmError | None = None


async def verify(
    store: SessionStore,
    backend: InferenceBackend,
    names: Sequence[SessionKey],
    *,
    tolerances: Mapping[StateFormat, float] = TOLERANCES,
    is_strict: bool = False,
) -> AsyncGenerator[Verified]:
    """One result for each name, in order. `is_strict`: states of other numerics classes are held to the tolerances too.
    Raises StoreUnavailable or EngineDead.
    """
    for name in names:
        try:
            with damage_of(f"session {name.session_id!r}", remedy=NEW_STORE):
                copy = await read_copy(store, name)
            verified = await _verify_copy(backend, name, copy, tolerances)
            yield verified if is_strict else _by_numerics(verified)
        except NotFound:
            yield Verified(name=name, verdict="gone")
        except (SnapshotCorrupt, NumericalError) as error:
            yield Verified(name=name, verdict="damaged", damage=error)
        except SessionBusy:
            yield Verified(name=name, verdict="busy")


async def _verify_copy(
    backend: InferenceBackend, name: SessionKey, copy: SessionCopy, tolerances: Mapping[StateFormat, float]
) -> Verified:
    """Raises SnapshotCorrupt for bytes that are no snapshot, NumericalError for a log that the model cannot read."""
    if copy.snapshot is None:
        return Verified(name=name, verdict="no_state" if copy.log_ids else "empty")
    snapshot = await asyncio.to_thread(Snapshot.decode, copy.snapshot)
    divergences, difference, rounding = _fields_that_differ(copy, snapshot), 0.0, None
    foreign = _model_of(snapshot, backend)
    is_fitting = snapshot.header.layout == backend.model.state_layout
    if foreign is None and not is_fitting:
        divergences.append(Divergence("layout", "is not that of the model's states"))
    if foreign is None and is_fitting and snapshot.header.position <= len(copy.log_ids):
        differences = await _tensors_that_differ(backend, name, copy, snapshot)
        difference, rounding = max(differences.values()), snapshot.header.rounding
        floats = {tensor.name for tensor in snapshot.header.layout if tensor.dtype == FLOAT}
        divergences += [
            Divergence(tensor, f"differs by {size:.3g}", size, tensor in floats and math.isfinite(size))
            for tensor, size in differences.items()
            if not size <= tolerances[rounding]
        ]
    numerics = snapshot.header.numerics
    return Verified(
        name=name,
        verdict="diverged" if divergences else foreign or "same",
        num_log_tokens=len(copy.log_ids),
        rounding=rounding,
        difference=difference,
        divergences=tuple(divergences),
        numerics=None if numerics == backend.model.numerics else numerics,
        earlier_numerics=snapshot.header.earlier_numerics,
    )


def _by_numerics(verified: Verified) -> Verified:
    """With the verdict `several_numerics` or `other_numerics` where that is why its numbers differ. Counts, and numbers
    that are none, are wrong under every class.
    """
    if verified.verdict != "diverged" or not all(found.is_of_numbers for found in verified.divergences):
        return verified
    if verified.earlier_numerics:
        return dataclasses.replace(verified, verdict="several_numerics")
    return verified if verified.numerics is None else dataclasses.replace(verified, verdict="other_numerics")


def _model_of(snapshot: Snapshot, backend: InferenceBackend) -> Literal["other_model", "other_tokenizer"] | None:
    if snapshot.header.tokenizer_fingerprint != backend.tokenizer.fingerprint:
        return "other_tokenizer"
    return None if snapshot.header.model_fingerprint == backend.model.fingerprint else "other_model"


def _fields_that_differ(copy: SessionCopy, snapshot: Snapshot) -> list[Divergence]:
    """All but the tensors: head, header, log and marks against each other."""
    head, header = copy.head, snapshot.header
    marks = [mark for mark in copy.marks if mark.version <= head.snapshot_version]
    log_ids = copy.log_ids[: marks[-1].num_log_tokens if marks else 0]  # as far as the snapshot's turn
    found = []
    for field in ("tenant", "session_id"):  # stored values may be another tenant's: they are not shown
        if getattr(header, field) != getattr(head, field):
            found.append(Divergence(field, "the snapshot is another session's"))
    found += _differing("version", header.version, head.snapshot_version)
    found += _differing("position", header.position, head.snapshot_position)
    found += _differing("model_fingerprint", header.model_fingerprint, head.model_fingerprint)
    has_pending = header.pending_id is not None
    found += _differing("log_length", len(log_ids), header.position + has_pending)
    in_log = log_ids[header.position] if has_pending and header.position < len(log_ids) else header.pending_id
    found += _differing("pending_token", header.pending_id, in_log)
    found += _marks_out_of_order(copy.marks)
    found += _differing("seed", header.sampler.seed, seed_of(marks))
    counts = sampled_counts(log_ids, marks)
    if dict(header.sampler.generated_counts) != counts:
        stored = sum(header.sampler.generated_counts.values())
        found.append(Divergence("penalty_counts", f"of {stored} tokens, the log has {sum(counts.values())}"))
    return found


def _differing(what: str, stored: object, derived: object) -> list[Divergence]:
    return [] if stored == derived else [Divergence(what, f"is {stored}, should be {derived}")]


def _marks_out_of_order(marks: Sequence[LogMark]) -> list[Divergence]:
    """The last mark is the head's: `read_copy` saw to that."""
    version, end = 0, 0
    for mark in marks:
        if mark.version <= version or not 0 <= mark.num_sampled <= mark.num_log_tokens - end:
            return [Divergence("marks", f"that of version {mark.version} does not follow that of version {version}")]
        version, end = mark.version, mark.num_log_tokens
    return []


async def _tensors_that_differ(
    backend: InferenceBackend, name: SessionKey, copy: SessionCopy, snapshot: Snapshot
) -> dict[str, float]:
    """The difference of each tensor. The log is read from its start, in the engine's chunks."""
    fed = copy.log_ids[: snapshot.header.position]
    finished = await read_again(backend, fed, request_id=f"verify-{name.session_id}", deadline=math.inf)
    if finished.end_state is None:
        raise finished.error or EngineDead("the engine was stopped")
    derived, header = finished.end_state.state, snapshot.header
    is_rounded = header.rounding is not StateFormat.FP32
    return await asyncio.to_thread(compare_states, header.layout, snapshot.state, derived, is_rounded=is_rounded)


def compare_states(
    layout: Sequence[TensorLayout], stored: bytes, derived: bytes, *, is_rounded: bool = False
) -> dict[str, float]:
    """By tensor how far the two are apart; infinite where one of them is no number. Counts have to be equal: their
    difference is at least 1 where they are not.

    Of numbers, the largest |stored - derived| / max(1, |derived|). Where they were rounded when they were stored, each
    of its turns added to the difference of a few, and what tells another text's state is the tensor as a whole: the
    length of the difference over that of the derived state.
    """
    differences, offset = {}, 0
    for tensor in layout:
        dtype = np.dtype(tensor.dtype).newbyteorder("<")
        one, other = (np.frombuffer(raw, dtype, count=tensor.num_values, offset=offset) for raw in (stored, derived))
        offset += tensor.num_bytes
        size = _difference(one.astype(np.float64), other.astype(np.float64), tensor.dtype == FLOAT, is_rounded)
        differences[tensor.name] = size if math.isfinite(size) else math.inf
    return differences


def _difference(stored: FloatArray, derived: FloatArray, is_float: bool, is_rounded: bool) -> float:
    apart = np.abs(stored - derived)
    if not is_float:
        return float(apart.max())
    if is_rounded:
        return float(np.linalg.norm(apart) / max(float(np.linalg.norm(derived)), _SMALLEST))
    return float(np.max(apart / np.maximum(1.0, np.abs(derived))))
