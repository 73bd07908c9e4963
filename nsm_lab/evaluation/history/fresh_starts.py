"""What history is worth in plain text: the loss with the state from token 0 against fresh states that start nearer."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from torch import Tensor

from nsm_core.errors import ConfigError
from nsm_core.execution.base import SequenceModel
from nsm_core.state.spec import State
from nsm_lab.evaluation.history.estimates import Estimate, mean_estimate
from nsm_lab.evaluation.history.rows import DocumentMeans, Row, batches, read
from nsm_lab.evaluation.losses import IntArray
from nsm_lab.evaluation.reading import EvaluatedModel, reading, rows_that_fit, sequence_losses

DEFAULT_STARTS = (512, 1024, 2048, 3072, 4096, 8192, 16384)  # tokens before a span
DEFAULT_SPANS = (8192, 16384, 32768)  # first target of a span
SPAN_LEN = 1024


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FreshStart:
    """`gain`: nats a token by which the state from token 0 beats one that starts `start` tokens before the span.

    `is_beyond_windows`: what only the longer history holds lies farther back than the attention layers reach.
    """

    start: int
    is_beyond_windows: bool
    gain: Estimate


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FreshStartResult:
    """`loss`: nats a token on the spans [first, first + span_len) with the state from token 0."""

    spans: tuple[int, ...]
    span_len: int
    loss: Estimate
    starts: tuple[FreshStart, ...]


def measure_fresh_starts(
    model: EvaluatedModel,
    texts: Sequence[IntArray],
    *,
    reach: int,
    starts: Sequence[int] = DEFAULT_STARTS,
    spans: Sequence[int] = DEFAULT_SPANS,
    span_len: int = SPAN_LEN,
    max_rows: int = 32,
    autocast: bool = False,
) -> FreshStartResult:
    """Reads `texts`, the ids [N] of whole documents, on the model's device.

    Each span is read with the state from token 0 and with a fresh state from each of `starts` tokens earlier, where at
    least as many tokens again lie before that. `reach`: see `attention_reach`. Raises ConfigError when no document is
    long enough for one comparison.
    """
    losses, gains = DocumentMeans(), DocumentMeans()
    with reading(model, autocast=autocast) as device:
        for documents, ids in batches(_rows(texts, spans, span_len), rows_that_fit(model, max_rows), device):
            for first, state in _states(model, ids, spans, span_len):
                span = ids[:, first - 1 : first + span_len]
                loss = sequence_losses(model, span, state).mean(dim=1)
                losses.add(0, documents, loss)
                for start in (start for start in starts if 2 * start <= first):
                    fresh = read(model, ids[:, first - start : first - 1], model.initial_state(len(ids)))
                    gains.add(start, documents, sequence_losses(model, span, fresh).mean(dim=1) - loss)
    if not gains.means():
        raise ConfigError("no document is long enough for a span and a fresh start before it")
    return FreshStartResult(
        spans=tuple(sorted(spans)),
        span_len=span_len,
        loss=mean_estimate(losses.means()[0]),
        starts=tuple(
            FreshStart(start=start, is_beyond_windows=start > reach, gain=mean_estimate(values))
            for start, values in gains.means().items()
        ),
    )


def _rows(texts: Sequence[IntArray], spans: Sequence[int], span_len: int) -> Iterator[Row]:
    """Each document up to the end of its last span; those that hold none are left out."""
    for number, tokens in enumerate(texts):
        if ends := [first + span_len for first in spans if first + span_len <= len(tokens)]:
            yield Row(number, tokens[: max(ends)])


def _states(model: SequenceModel, ids: Tensor, spans: Sequence[int], span_len: int) -> Iterator[tuple[int, State]]:
    """For each span of `ids` [B, N] its first target, and the state before the token that predicts that."""
    state, position = model.initial_state(len(ids)), 0
    for first in sorted(first for first in spans if first + span_len <= ids.shape[1]):
        state = read(model, ids[:, position : first - 1], state)
        position = first - 1
        yield first, state
