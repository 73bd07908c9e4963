"""[B, V] logits -> B tokens, each row by its own parameters."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from nsm_core.errors import NumericalError
from nsm_core.ops.dispatch import runs_kernels
from nsm_core.sampling.device import (
    PendingTokens,
    fits_device,
    has_draws,
    launch_on_device,
    pack_sampling_params,
    sample_on_device,
)
from nsm_core.sampling.logprobs import to_numpy, token_logprob
from nsm_core.sampling.masks import MaskLogits, TokenMasks, mask_reference
from nsm_core.sampling.params import SamplingParams
from nsm_core.sampling.processors import adjust, apply_filters, needs_adjustment, to_weights
from nsm_core.sampling.result import NOT_FINITE, SampledToken
from nsm_core.sampling.rng import uniforms

Logits = npt.NDArray[np.float32]


class SampledRow(Protocol):
    """One row of a batch, as the sampler reads it."""

    @property
    def params(self) -> SamplingParams: ...

    @property
    def position(self) -> int:
        """Absolute position of the token to sample, i.e. the number of tokens fed before it in the whole session."""
        ...

    @property
    def generated_counts(self) -> Mapping[int, int]:
        """The session's count of each sampled token, for rows with penalties; a `TokenCounts` needs no conversion."""
        ...

    @property
    def packed_params(self) -> bytes:
        """`pack_sampling_params` of its parameters."""
        ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRow:
    """A SampledRow as a plain value."""

    params: SamplingParams
    position: int
    generated_counts: Mapping[int, int]

    @property
    def packed_params(self) -> bytes:
        return pack_sampling_params(self.params)


class Draw(Protocol):
    """Steps 4 to 6 of `Sampler`, for rows that are not greedy. `draw_reference` is its specification.

    The uniform draws are the same everywhere. Weights may be rounded differently, so a token may differ if a draw lies
    within rounding of the boundary between two tokens.
    """

    def __call__(self, logits: Logits, indices: Sequence[int], rows: Sequence[SampledRow]) -> npt.NDArray[np.int64]:
        """logits [B, V], not modified; indices [R]: the index into logits of each of `rows` [R]. Returns ids [R]."""
        ...


class Sampler:
    """Chooses the next token of each row.

    The order of the steps, on one row:

    1. logit bias is added
    2. repetition penalty: logits of tokens sampled before are divided by it when positive, multiplied when not
    3. presence penalty, and frequency penalty times the count, are subtracted
       Then tokens that a row's mask does not allow are made impossible
    4. temperature 0: the largest logit wins, the lowest id among equals. Otherwise logits are divided by it
    5. top-k, then top-p of the remaining tokens, then min-p against the most likely token
    6. the first id whose cumulative weight, over ids in ascending order, exceeds u times the total, where u is the
       counter-based `uniform(seed, choice_index, position)`

    A row's result is a function of its own logits, params, position and counts: neighbours and batch size change
    nothing, not even the last bit. Log-probabilities are those of the raw logits, before step 1.

    Unadjusted rows (`SamplingParams.is_unadjusted`) on a GPU are sampled there: their masks are copied to it, and their
    logits are not copied to the host.
    """

    def __init__(self, draw: Draw | None = None, mask: MaskLogits = mask_reference) -> None:
        """`draw`, `mask`: those of the executor; by default the references."""
        self._draw, self._mask = draw or draw_reference, mask

    def sample(
        self, logits: Tensor, rows: Sequence[SampledRow], masks: TokenMasks | None = None
    ) -> list[SampledToken | NumericalError]:
        """logits [B, V], one row of it for each of `rows`; not modified, save where there are masks. `masks`: of rows
        that may not have every token; none of them is plain.

        A row with NaN or infinite logits gives a NumericalError, returned and not raised: the other rows have tokens.
        """
        if logits.shape[0] != len(rows):
            raise ValueError(f"{logits.shape[0]} rows of logits for {len(rows)} requests")
        if not (runs_kernels(logits) and fits_device(logits)):
            return self._sample_on_host(logits, rows, masks)
        unadjusted = [row.params.is_unadjusted for row in rows]
        if all(unadjusted):
            return _sample_there(logits, rows, masks)
        chosen: list[SampledToken | NumericalError] = [not_finite(row.position) for row in rows]
        for sample, is_wanted in ((_sample_there, True), (self._sample_on_host, False)):
            indices = [index for index, is_unadjusted in enumerate(unadjusted) if is_unadjusted is is_wanted]
            if not indices:
                continue
            of_masks = None if masks is None else masks.within(indices)
            tokens = sample(logits[indices], [rows[index] for index in indices], of_masks)
            for index, token in zip(indices, tokens, strict=True):
                chosen[index] = token
        return chosen

    def launch(self, logits: Tensor, rows: Sequence[SampledRow], params: npt.NDArray[np.int64]) -> PendingTokens:
        """Like `sample`, for plain rows; params: `pack_rows` of them. Only `PendingTokens.wait` waits."""
        if runs_kernels(logits) and fits_device(logits):
            return launch_on_device(logits, params)
        if not has_draws(params):
            raw = to_numpy(logits)
            likeliest = np.where(np.isfinite(raw).all(axis=-1), raw.argmax(axis=-1), NOT_FINITE)
            return PendingTokens(torch.from_numpy(likeliest).to(logits.device))
        sampled = self._sample_on_host(logits, rows, None)
        ids = [token.token_id if isinstance(token, SampledToken) else NOT_FINITE for token in sampled]
        return PendingTokens(torch.tensor(ids, device=logits.device))

    def _sample_on_host(
        self, logits: Tensor, rows: Sequence[SampledRow], masks: TokenMasks | None
    ) -> list[SampledToken | NumericalError]:
        raw = to_numpy(logits)
        is_finite: npt.NDArray[np.bool_] = np.asarray(np.isfinite(raw).all(axis=-1))
        good = [index for index in range(len(rows)) if is_finite[index]]
        adjusted = _adjust(raw, rows, good)
        has_logprobs = any(row.params.logprobs is not None for row in rows)
        forced: dict[int, int] = {}  # rows that have no choice need none
        if masks is not None:
            forced_ids = masks.forced_ids()
            forced = dict(
                zip(masks.indices[forced_ids >= 0].tolist(), forced_ids[forced_ids >= 0].tolist(), strict=True)
            )
            adjusted = raw.copy() if has_logprobs and adjusted is raw else adjusted
            self._mask(adjusted, masks.of_rows(forced_ids < 0))
        token_ids = adjusted.argmax(axis=-1)  # enough for greedy rows
        drawn = [index for index in good if not rows[index].params.is_greedy and index not in forced]
        if drawn:
            token_ids[drawn] = self._draw(adjusted, drawn, [rows[index] for index in drawn])
        ids: list[int] = token_ids.tolist()
        for index, token_id in forced.items():
            ids[index] = token_id
        if len(good) == len(rows) and not has_logprobs:
            return [SampledToken(token_id) for token_id in ids]
        return [
            _report(raw[index], ids[index], row.params) if finite else not_finite(row.position)
            for index, (row, finite) in enumerate(zip(rows, is_finite.tolist(), strict=True))
        ]


def _sample_there(
    logits: Tensor, rows: Sequence[SampledRow], masks: TokenMasks | None
) -> list[SampledToken | NumericalError]:
    """On the device that has the logits."""
    return [
        not_finite(row.position) if token_id is None else SampledToken(token_id=token_id)
        for token_id, row in zip(sample_on_device(logits, rows, masks), rows, strict=True)
    ]


def _adjust(raw: Logits, rows: Sequence[SampledRow], good: Sequence[int]) -> Logits:
    wanted = [index for index in good if needs_adjustment(rows[index].params, rows[index].generated_counts)]
    if not wanted:
        return raw
    adjusted = raw.copy()
    for index in wanted:
        adjust(adjusted[index], rows[index].params, rows[index].generated_counts)
    return adjusted


def draw_reference(logits: Logits, indices: Sequence[int], rows: Sequence[SampledRow]) -> npt.NDArray[np.int64]:
    """A `Draw` in numpy, on any machine."""
    weights = logits[indices]  # a copy
    to_weights(weights, np.array([row.params.temperature for row in rows], dtype=np.float32))
    for row_weights, row in zip(weights, rows, strict=True):
        apply_filters(row_weights, row.params)
    draws = uniforms([(row.params.seed, row.params.choice_index, row.position) for row in rows])
    # torch and not numpy: its cumulative sum over rows is ten times as fast; it runs serially along each row
    cumulative = torch.from_numpy(weights).cumsum(dim=-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    # u below 1 times the total may round up to the total, which nothing exceeds
    target = torch.minimum(torch.from_numpy(draws)[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    chosen: npt.NDArray[np.int64] = torch.searchsorted(cumulative, target, right=True)[:, 0].numpy()
    return chosen


def _report(raw: npt.NDArray[np.float32], token_id: int, params: SamplingParams) -> SampledToken:
    if params.logprobs is None:
        return SampledToken(token_id=token_id)
    return SampledToken(token_id=token_id, logprob=token_logprob(raw, token_id, params.logprobs))


def not_finite(position: int) -> NumericalError:
    """The error of a request whose logits are not finite."""
    return NumericalError(f"the model gave logits that are not finite at position {position}")
