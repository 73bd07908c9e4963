"""How prompts are divided among recorded graphs; none is recorded here."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the compiler is not installed")
from nsm_core.execution.cuda.prompt_reader import ROWS, PromptReader


class Reader(PromptReader):
    """Notes what it would read, and returns the rows."""

    def __init__(self) -> None:
        self._memory = object()
        self.replayed: list[tuple[tuple[int, int], int]] = []
        self.num_at_once = 0

    def _replay(self, size: tuple[int, int], rows: Sequence[int], ids: Sequence[Sequence[int]]) -> list[Tensor]:
        self.replayed.append((size, len(rows)))
        return [torch.tensor(row) for row in rows]

    def _read_at_once(self, rows: Sequence[int], ids: Sequence[Sequence[int]]) -> list[Tensor]:
        self.num_at_once += 1
        return [torch.tensor(row) for row in rows]


def test_more_short_prompts_than_a_graph_has_rows_are_read_by_several() -> None:
    reader, number = Reader(), 2 * ROWS[-1] + 3
    hidden = reader.read(range(number), [[1] * 45] * number)
    assert [int(row) for row in hidden] == list(range(number))
    assert reader.replayed == [((32, 64), 32), ((32, 64), 32), ((4, 64), 3)]
    assert reader.num_at_once == 0


def test_long_prompts_are_read_at_once() -> None:
    reader = Reader()
    reader.read(range(40), [[1] * 600] * 40)
    reader.read([0], [[1] * 5000])
    assert (reader.replayed, reader.num_at_once) == ([], 2)
