"""The cost of storing a state in fewer bits: perplexity after a resume against a run with the exact state."""

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
class StoredStateBucket:
    """The tokens [start, stop) after the resume. Changes are relative: 0.001 is 0.1 % more perplexity."""

    start: int
    stop: int
    num_tokens: int
    nats: float  # from the stored state
    exact_nats: float
    change: float
    low: float  # 95 % bootstrap interval over documents
    high: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StoredFormat:
    """One stored format; the last bucket is that of all tokens after the resume."""

    format: str
    state_bytes: int
    buckets: tuple[StoredStateBucket, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StoredStateResult:
    """States stored after every `prefix_len` tokens, `num_saves` times in each document."""

    num_documents: int
    num_saves: int  # of each document
    prefix_len: int
    formats: tuple[StoredFormat, ...]


def measure_stored_states(
    model: EvaluatedModel,
    documents: Sequence[EncodedDocument],
    *,
    prefix_len: int = 1024,
    max_saves: int = 4,
    max_rows: int = 32,
    formats: Sequence[StateFormat] = tuple(StateFormat),
    seed: int = 0,
) -> StoredStateResult:
    """Stores each document's state up to `max_saves` times and reads on for EDGES[-1] tokens each time.

    In fp32 on every device: the rounding of bf16 arithmetic would drown that of the states. Only documents long enough
    for one save take part; the shortest of them sets the number of saves of all. Raises ConfigError if there is none.
    """
    texts, num_saves = _texts(documents, prefix_len, max_saves)
    rows = rows_that_fit(model, max_rows)
    exact: list[FloatArray] = []
    stored: dict[StateFormat, list[FloatArray]] = {state_format: [] for state_format in formats}
    total = len(texts) * num_saves
    with (
        tqdm(total=total, unit="save", desc="stored_states", disable=None) as bar,
        reading(model) as device,
    ):
        for first in range(0, len(texts), rows):
            group = texts[first : first + rows].to(device)
            plain: list[Tensor] = []
            rounded: dict[StateFormat, list[Tensor]] = {state_format: [] for state_format in formats}
            for state, following in _save_points(model, group, prefix_len, num_saves):
                plain.append(sequence_losses(model, following, state))
                for state_format in formats:
                    start = stored_state(model.state_spec, state, state_format)
                    rounded[state_format].append(sequence_losses(model, following, start))
                bar.update(len(group))
            exact.append(_stacked(plain))
            for state_format in formats:
                stored[state_format].append(_stacked(rounded[state_format]))
    base = np.concatenate(exact)
    return StoredStateResult(
        num_documents=len(texts),
        num_saves=num_saves,
        prefix_len=prefix_len,
        formats=tuple(
            StoredFormat(
                format=state_format.value,
                state_bytes=stored_bytes(model.state_spec.layout(), state_format),
                buckets=_buckets(np.concatenate(stored[state_format]), base, seed),
            )
            for state_format in formats
        ),
    )


def stored_state(spec: StateSpec, state: State, state_format: StateFormat) -> State:
    """`state` [B, *shape], stored in `state_format` and read again. Raises NumericalError if a value does not fit."""
    layout, device = spec.layout(), next(iter(state.values())).device
    rows = []
    for row in range(len(next(iter(state.values())))):
        stored = encode_state(layout, spec.pack(state, row), state_format)
        rows.append(spec.unpack(decode_state(layout, stored, state_format)))
    return {tensor.name: torch.cat([row[tensor.name] for row in rows]).to(device) for tensor in spec.tensors}


def _texts(documents: Sequence[EncodedDocument], prefix_len: int, max_saves: int) -> tuple[Tensor, int]:
    """Ids [D, num_saves * prefix_len + EDGES[-1] + 1] and the number of saves; the last id is a target only."""
    needed = prefix_len + EDGES[-1]
    usable = [document for document in documents if len(document) >= needed]
    if not usable:
        longest = max(map(len, documents), default=0)
        raise ConfigError(f"stored_states needs a document of {needed} tokens, the longest has {longest}")
    num_saves = min(max_saves, (min(map(len, usable)) - EDGES[-1]) // prefix_len)
    num_ids = num_saves * prefix_len + EDGES[-1] + 1
    return torch.from_numpy(np.stack([document.tokens[:num_ids] for document in usable])), num_saves


def _save_points(model: SequenceModel, ids: Tensor, prefix_len: int, num_saves: int) -> Iterator[tuple[State, Tensor]]:
    """The state after each multiple of `prefix_len` tokens, and the ids [D, EDGES[-1] + 1] that follow there."""
    state = model.initial_state(len(ids))
    for number in range(1, num_saves + 1):
        end = number * prefix_len
        _, state = read_in_segments(model, ids[:, end - prefix_len : end], state, _SEGMENT_LEN)
        yield state, ids[:, end : end + EDGES[-1] + 1]


def _stacked(saves: list[Tensor]) -> FloatArray:
    """[D, saves, N] fp64."""
    stacked: FloatArray = torch.stack(saves, dim=1).double().cpu().numpy()
    return stacked


def _buckets(stored: FloatArray, exact: FloatArray, seed: int) -> tuple[StoredStateBucket, ...]:
    """stored, exact: nats [D, saves, N]."""
    bounds = [*itertools.pairwise(EDGES), (0, EDGES[-1])]
    return tuple(
        _bucket(
            stored[..., start:stop].sum(axis=(1, 2)),
            exact[..., start:stop].sum(axis=(1, 2)),
            start,
            stop,
            stored.shape[1] * (stop - start),
            seed,
        )
        for start, stop in bounds
    )


def _bucket(
    nats: FloatArray, exact: FloatArray, start: int, stop: int, tokens_per_document: int, seed: int
) -> StoredStateBucket:
    """nats, exact: sums [D]."""
    change = (nats - exact) / tokens_per_document  # nats per token, for each document
    rows = np.random.default_rng(seed).integers(len(nats), size=(_RESAMPLES, len(nats)))
    low, high = np.quantile(change[rows].mean(axis=1), (0.025, 0.975))
    return StoredStateBucket(
        start=start,
        stop=stop,
        num_tokens=tokens_per_document * len(nats),
        nats=float(nats.sum()),
        exact_nats=float(exact.sum()),
        change=float(np.expm1(change.mean())),
        low=float(np.expm1(low)),
        high=float(np.expm1(high)),
    )
