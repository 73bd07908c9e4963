"""Rows of tokens cut from documents, read in batches of equal length."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from nsm_core.execution.base import SequenceModel
from nsm_core.state.spec import State
from nsm_lab.evaluation.losses import IntArray

# Tokens a forward call: speed and memory only.
SEGMENT_LEN = 2048


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """Tokens [N] of the document with the number `document`."""

    document: int
    tokens: IntArray


def spread_rows(document: int, tokens: IntArray, length: int, most: int) -> list[Row]:
    """Up to `most` rows of `length` tokens that do not overlap, spread over the document from its first token on.

    None when the document is shorter.
    """
    count = min(most, len(tokens) // length)
    apart = (len(tokens) - length) // max(1, count - 1)
    return [Row(document, tokens[number * apart : number * apart + length]) for number in range(count)]


def batches(rows: Iterable[Row], size: int, device: torch.device) -> Iterator[tuple[list[int], Tensor]]:
    """(documents [B], ids [B, N]) of up to `size` rows, all of one length."""
    by_length: dict[int, list[Row]] = defaultdict(list)
    for row in rows:
        by_length[len(row.tokens)].append(row)
    for same in by_length.values():
        for first in range(0, len(same), size):
            part = same[first : first + size]
            ids = torch.stack([torch.as_tensor(row.tokens, dtype=torch.int64) for row in part])
            yield [row.document for row in part], ids.to(device)


def read(model: SequenceModel, ids: Tensor, state: State) -> State:
    """The state after ids [B, T] on top of `state`; T may be 0. Activations of one segment exist at a time."""
    for segment in torch.split(ids, SEGMENT_LEN, dim=1):
        if segment.shape[1]:
            _, state = model.forward(segment, state)
    return state


class DocumentMeans:
    """Collects values by a key and a document, one or several of each, and gives the mean of each document."""

    def __init__(self) -> None:
        self._values: dict[int, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))

    def add(self, key: int, documents: Sequence[int], values: Tensor) -> None:
        """values [B], one of each of `documents`."""
        for document, value in zip(documents, values.double().tolist(), strict=True):
            self._values[key][document].append(value)

    def means(self) -> dict[int, list[float]]:
        """For each key, in rising order, the means of its documents, in the order of their numbers."""
        return {
            key: [sum(values) / len(values) for _, values in sorted(self._values[key].items())]
            for key in sorted(self._values)
        }
