"""Torch's number of threads while weights are read."""

from __future__ import annotations

import pytest
import torch

from nsm_core.formats.one_thread import one_thread


def test_the_number_of_threads_comes_back_after_an_error_too() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with pytest.raises(ValueError, match="bad file"), one_thread():
            assert torch.get_num_threads() == 1
            raise ValueError("bad file")
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
