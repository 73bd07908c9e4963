"""What a model gains on a passage that it has read before, by how many tokens ago that was."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from nsm_core.errors import ConfigError
from nsm_core.execution.base import SequenceModel
from nsm_lab.evaluation.history.estimates import Estimate, mean_estimate
from nsm_lab.evaluation.history.rows import DocumentMeans, Row, batches, read, spread_rows
from nsm_lab.evaluation.losses import IntArray
from nsm_lab.evaluation.reading import EvaluatedModel, reading, rows_that_fit, sequence_losses

DEFAULT_DISTANCES = (512, 1024, 1792, 3328, 4096, 6400, 8192, 16384)  # tokens
PASSAGE_LEN = 256
# Tokens before the earliest copy, so that it stands in a text and not at its start.
LEAD = 512


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RepeatGain:
    """`gain`: nats a token of a passage that was read `distance` tokens before, against the same passage unread.

    `is_beyond_windows`: the whole of the earlier copy lies farther back than the attention layers reach.
    """

    distance: int
    is_beyond_windows: bool
    gain: Estimate


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RepeatResult:
    """`unread_loss`: nats a token of the passages where they were not read before."""

    passage_len: int
    unread_loss: Estimate
    distances: tuple[RepeatGain, ...]


def measure_repeats(
    model: EvaluatedModel,
    texts: Sequence[IntArray],
    *,
    reach: int,
    distances: Sequence[int] = DEFAULT_DISTANCES,
    passages: int = 4,
    passage_len: int = PASSAGE_LEN,
    max_rows: int = 32,
    autocast: bool = False,
) -> RepeatResult:
    """Up to `passages` passages of each of `texts` (ids [N] of a document), on the model's device.

    A passage is the text's own continuation at some position. For each distance the tokens that stand so far before it
    are overwritten with a copy of it: the copy is read, then the text between, then the passage. The control is the
    text as it is, so passage, position and all other context are the same. Distances that no document is long enough
    for are left out. `reach`: see `attention_reach`. Raises ConfigError when that leaves none, or for a distance at
    which the copy would overlap the passage.
    """
    if min(distances) <= passage_len:
        raise ConfigError(f"repeat distances must be above the passage's {passage_len} tokens, got {min(distances)}")
    unread, gains = DocumentMeans(), DocumentMeans()
    with reading(model, autocast=autocast) as device:
        rows = _rows(texts, distances, passages, passage_len)
        for documents, ids in batches(rows, rows_that_fit(model, max_rows), device):
            control, repeated = _losses(model, ids, distances, passage_len)
            unread.add(0, documents, control)
            for distance, loss in repeated.items():
                gains.add(distance, documents, control - loss)
    if not gains.means():
        raise ConfigError(f"no document is long enough for a passage that is repeated {min(distances)} tokens later")
    return RepeatResult(
        passage_len=passage_len,
        unread_loss=mean_estimate(unread.means()[0]),
        distances=tuple(
            RepeatGain(
                distance=distance,
                is_beyond_windows=distance - passage_len > reach,
                gain=mean_estimate(values),
            )
            for distance, values in gains.means().items()
        ),
    )


def _rows(texts: Sequence[IntArray], distances: Sequence[int], passages: int, passage_len: int) -> Iterator[Row]:
    """Rows that end with a passage, as long as the document's largest distance asks for."""
    for number, tokens in enumerate(texts):
        lengths = [LEAD + distance + passage_len for distance in distances]
        if fitting := [length for length in lengths if length <= len(tokens)]:
            yield from spread_rows(number, tokens, max(fitting), passages)


def _losses(
    model: SequenceModel, ids: Tensor, distances: Sequence[int], passage_len: int
) -> tuple[Tensor, dict[int, Tensor]]:
    """Mean nats [B] of the last `passage_len` tokens of `ids` [B, N]: unread before, and by distance of a copy."""
    passage = ids.shape[1] - passage_len
    copy, state, position = ids[:, passage:], model.initial_state(len(ids)), 0
    last = ids[:, passage - 1 :]  # the token that predicts the first of the passage, and the passage
    repeated: dict[int, Tensor] = {}
    for distance in sorted(distances, reverse=True):
        start = passage - distance
        if start < LEAD:
            continue
        state = read(model, ids[:, position:start], state)
        position = start
        between = ids[:, start + passage_len : passage - 1]
        after_copy = read(model, torch.cat((copy, between), dim=1), state)
        repeated[distance] = sequence_losses(model, last, after_copy).mean(dim=1)
    state = read(model, ids[:, position : passage - 1], state)
    return sequence_losses(model, last, state).mean(dim=1), repeated
