from __future__ import annotations

import threading

import torch

from nsm_core.execution.native.executor import NativeExecutor
from nsm_core.execution.native.unpacked import unpacked_model
from nsm_core.execution.native.weights import NativeWeights
from nsm_core.inspection.probe import RoutingProbe
from nsm_core.inspection.reading import inspect
from nsm_core.inspection.shared_copy import shared_copy
from nsm_core.model.nsm import NsmModel
from tests.support.models import random_model, small_config

IDS = torch.randint(64, (20,), generator=torch.Generator().manual_seed(8)).tolist()


def test_a_twin_computes_the_same_from_the_same_weights() -> None:
    model = random_model(small_config(64, layer_pattern="(NW)"))
    copy = shared_copy(model)
    assert all(one is other for one, other in zip(model.parameters(), copy.parameters(), strict=True))
    assert not set(model.modules()) & set(copy.modules())
    with torch.inference_mode():
        ids = torch.tensor([IDS])
        assert torch.equal(model(ids, model.initial_state(1))[0], copy(ids, copy.initial_state(1))[0])


def test_who_watches_a_twin_sees_nothing_of_the_models_own_steps() -> None:
    """The engine's thread makes steps of the model while another thread looks at the twin."""
    model = random_model(small_config(64))
    alone, copy = inspect(model, IDS), shared_copy(model)
    stopped = threading.Event()

    def serve() -> None:
        probe = RoutingProbe(model)
        while not stopped.is_set():
            probe.capture(model.initial_state(1), [[5]])

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        beside = inspect(copy, IDS)
    finally:
        stopped.set()
        thread.join()
    for one, other in zip(alone.layers, beside.layers, strict=True):
        assert torch.equal(one.write, other.write)
        assert torch.equal(one.read, other.read)


def test_a_model_on_packed_weights_has_a_twin_on_the_same() -> None:
    model = random_model(small_config(64, layer_pattern="NW"))
    weights = NativeWeights(model)
    packed: NsmModel = unpacked_model(model, weights)
    NativeExecutor(model, num_rows=1, weights=weights)
    (one, _), (other, _) = inspect(packed, IDS).layers, inspect(shared_copy(packed), IDS).layers
    assert torch.equal(one.write, other.write)
