"""What it costs to park a state in fewer bits: perplexity after a resume against the run that was never parked."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from nsm_core.errors import ConfigError
from nsm_core.execution.base import SequenceModel
from nsm_core.state.layout import parse_layout
from nsm_core.state.quantize import StateFormat, decode_state, encode_state, stored_bytes
from nsm_core.state.spec import State, StateSpec
from nsm_lab.evaluation.losses import FloatArray
from nsm_lab.evaluation.perplexity import EncodedDocument
from nsm_lab.evaluation.reading import EvaluatedModel, read_in_segments, reading, rows_that_fit, sequence_losses

# Edges in tokens after the resume; the last is the number of tokens read.
EDGES = (0, 16, 64, 256, 1024)
_SEGMENT_LEN = 4096
_RESAMPLES = 2000


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ParkingBucket:
    """The tokens [start, stop) after the resume. Changes are relative: 0.001 is 0.1 % more perplexity."""

    start: int
    stop: int
    num_tokens: int
    nats: float  # after parking
    unparked_nats: float
    change: float
    low: float  # 95 % bootstrap interval over documents
    high: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ParkedFormat:
    """One stored format; the last bucket is that of all tokens after the resume."""

    format: str
    state_bytes: int
    buckets: tuple[ParkingBucket, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ParkingResult:
    """States parked after `prefix_len` tokens, and again after every further `prefix_len` tokens."""

    num_documents: int
    num_parks: int  # of each document
    prefix_len: int
    formats: tuple[ParkedFormat, ...]


def measure_parking(
    model: EvaluatedModel,
    documents: Sequence[EncodedDocument],
    *,
    prefix_len: int = 1024,
    max_parks: int = 4,
    max_rows: int = 32,
    formats: Sequence[StateFormat] = tuple(StateFormat),
    seed: int = 0,
) -> ParkingResult:
    """Parks each document's state up to `max_parks` times and reads on for EDGES[-1] tokens each time.

    In fp32 on every device: the rounding of bf16 arithmetic would drown that of the states. Only documents long enough
    for one park take part; the shortest of them decides how often all are parked. Raises ConfigError when there is
    none.
    """
    texts, num_parks = _texts(documents, prefix_len, max_parks)
    rows = rows_that_fit(model, max_rows)
    unparked: list[FloatArray] = []
    parked: dict[StateFormat, list[FloatArray]] = {form: [] for form in formats}
    total = len(texts) * num_parks
    with (
        tqdm(total=total, unit="park", desc="parking", disable=None) as bar,
        reading(model) as device,
    ):
        for first in range(0, len(texts), rows):
            group = texts[first : first + rows].to(device)
            plain: list[Tensor] = []
            rounded: dict[StateFormat, list[Tensor]] = {form: [] for form in formats}
            for state, following in _park_points(model, group, prefix_len, num_parks):
                plain.append(sequence_losses(model, following, state))
                for form in formats:
                    rounded[form].append(sequence_losses(model, following, parked_state(model.state_spec, state, form)))
                bar.update(len(group))
            unparked.append(_stacked(plain))
            for form in formats:
                parked[form].append(_stacked(rounded[form]))
    base = np.concatenate(unparked)
    return ParkingResult(
        num_documents=len(texts),
        num_parks=num_parks,
        prefix_len=prefix_len,
        formats=tuple(
            ParkedFormat(
                format=form.value,
                state_bytes=stored_bytes(parse_layout(model.state_spec.layout()), form),
                buckets=_buckets(np.concatenate(parked[form]), base, seed),
            )
            for form in formats
        ),
    )


def parked_state(spec: StateSpec, state: State, form: StateFormat) -> State:
    """`state` [B, *shape] as it comes back from being stored in `form`. Raises NumericalError when it does not fit."""
    layout, device = parse_layout(spec.layout()), next(iter(state.values())).device
    rows = []
    for row in range(len(next(iter(state.values())))):
        stored = encode_state(layout, spec.pack(state, row), form)
        rows.append(spec.unpack(decode_state(layout, stored, form)))
    return {tensor.name: torch.cat([row[tensor.name] for row in rows]).to(device) for tensor in spec.tensors}


def _texts(documents: Sequence[EncodedDocument], prefix_len: int, max_parks: int) -> tuple[Tensor, int]:
    """Ids [D, num_parks * prefix_len + EDGES[-1] + 1] and the number of parks; the last id is a target only."""
    needed = prefix_len + EDGES[-1]
    usable = [document for document in documents if len(document) >= needed]
    if not usable:
        longest = max(map(len, documents), default=0)
        raise ConfigError(f"parking needs a document of {needed} tokens, the longest has {longest}")
    num_parks = min(max_parks, (min(map(len, usable)) - EDGES[-1]) // prefix_len)
    num_ids = num_parks * prefix_len + EDGES[-1] + 1
    return torch.from_numpy(np.stack([document.tokens[:num_ids] for document in usable])), num_parks


def _park_points(model: SequenceModel, ids: Tensor, prefix_len: int, num_parks: int) -> Iterator[tuple[State, Tensor]]:
    """The state after each multiple of `prefix_len` tokens, and the ids [D, EDGES[-1] + 1] that follow there."""
    state = model.initial_state(len(ids))
    for number in range(1, num_parks + 1):
        park = number * prefix_len
        _, state = read_in_segments(model, ids[:, park - prefix_len : park], state, _SEGMENT_LEN)
        yield state, ids[:, park : park + EDGES[-1] + 1]


def _stacked(parks: list[Tensor]) -> FloatArray:
    """[D, parks, N] fp64."""
    stacked: FloatArray = torch.stack(parks, dim=1).double().cpu().numpy()
    return stacked


def _buckets(parked: FloatArray, unparked: FloatArray, seed: int) -> tuple[ParkingBucket, ...]:
    """parked, unparked: nats [D, parks, N]."""
    bounds = [*itertools.pairwise(EDGES), (0, EDGES[-1])]
    return tuple(
        _bucket(
            parked[..., start:stop].sum(axis=(1, 2)),
            unparked[..., start:stop].sum(axis=(1, 2)),
            start,
            stop,
            parked.shape[1] * (stop - start),
            seed,
        )
        for start, stop in bounds
    )


def _bucket(
    nats: FloatArray, unparked: FloatArray, start: int, stop: int, tokens_per_document: int, seed: int
) -> ParkingBucket:
    """nats, unparked: sums [D]."""
    change = (nats - unparked) / tokens_per_document  # nats a token, document by document
    rows = np.random.default_rng(seed).integers(len(nats), size=(_RESAMPLES, len(nats)))
    low, high = np.quantile(change[rows].mean(axis=1), (0.025, 0.975))
    return ParkingBucket(
        start=start,
        stop=stop,
        num_tokens=tokens_per_document * len(nats),
        nats=float(nats.sum()),
        unparked_nats=float(unparked.sum()),
        change=float(np.expm1(change.mean())),
        low=float(np.expm1(low)),
        high=float(np.expm1(high)),
    )
