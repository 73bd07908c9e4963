"""The threads of a model that is loaded while a running server serves another one."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Iterator

import pytest
import torch

from nsm_core.control_group import usable_threads
from nsm_core.formats.one_thread import one_thread
from service import local_model
from service.settings import Settings, load_settings


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    local_model._threads_at_start.cache_clear()
    yield
    local_model._threads_at_start.cache_clear()
    torch.set_num_threads(before)


def threads_of(settings: Settings) -> int:
    """Of a model that is loaded on a new thread, as a further model is."""
    with concurrent.futures.ThreadPoolExecutor(max_workers=1) as pool:
        return pool.submit(local_model.with_model, settings, lambda _: torch.get_num_threads(), is_whole=False).result()


@pytest.mark.usefixtures("two_threads")
def test_a_model_that_is_loaded_during_a_capture_of_routing_has_the_threads_of_the_settings() -> None:
    settings = load_settings(model="pulse-books-small", device="cpu")
    assert threads_of(settings) == usable_threads(2)
    with one_thread():
        assert threads_of(settings) == usable_threads(2)
        assert threads_of(load_settings(model="pulse-books-small", device="cpu", num_threads=2)) == 2
    assert torch.get_num_threads() == 2
