"""A text that is read token by token for the states of a session, in the process of the engine."""

from __future__ import annotations

import asyncio

import pytest
import torch
from torch import Tensor

from nsm_core.model.nsm import NsmModel
from nsm_core.state.spec import State
from nsm_core.tokenizer import Tokenizer
from tests.support.models import local_backend

LOOP_THREADS = 2


async def test_a_text_is_inspected_on_one_thread(tiny_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its many small operations would wait for the second thread, and the engine's kernels for both."""
    backend = local_backend(tiny_tokenizer)
    seen: list[int] = []
    step = NsmModel.step

    def stepping(self: NsmModel, ids: Tensor, state: State) -> tuple[Tensor, State]:
        seen.append(torch.get_num_threads())
        return step(self, ids, state)

    monkeypatch.setattr(NsmModel, "step", stepping)
    before = torch.get_num_threads()
    torch.set_num_threads(LOOP_THREADS)
    try:
        layers = await backend.inspect_text(None, (3, 4, 5))
        assert torch.get_num_threads() == LOOP_THREADS
        assert await asyncio.to_thread(torch.get_num_threads) == LOOP_THREADS
    finally:
        torch.set_num_threads(before)
    assert seen == [1, 1, 1]
    assert layers
