"""Slot memory for graphs: the order of nodes is nothing, edges are."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nsm_core.config import ModelConfig
from nsm_lab.graph import GraphMixer, GraphNsm
from tests.support.counts import scaled

CONFIG = ModelConfig(d_model=16, num_layers=2, num_heads=2, num_memory_slots=6, write_top_k=3, mlp_hidden=32)
CONFIGS = {"softmax": CONFIG, "sigmoid": dataclasses.replace(CONFIG, router="sigmoid", write_top_k=6)}


def make_model(config: ModelConfig) -> GraphNsm:
    """In fp64, with random weights everywhere: the last matrices start at zero and would hide the rest."""
    torch.manual_seed(3)
    model = GraphNsm(config, num_features=4, num_labels=3).double().requires_grad_(False)
    for name, weight in model.named_parameters():
        if name.endswith(("out.weight", "down.weight")):
            weight.normal_(std=weight.shape[1] ** -0.5)
    return model


MODELS = {name: make_model(config) for name, config in CONFIGS.items()}


def random_graphs(batch: int, num_nodes: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(batch, num_nodes, 4, generator=generator, dtype=torch.float64)
    return features, torch.rand(batch, num_nodes, num_nodes, generator=generator) < 0.3


@pytest.mark.parametrize("router", MODELS)
@settings(max_examples=scaled(25, 1000), deadline=None)
@given(num_nodes=st.integers(1, 12), seed=st.integers(0, 2**31))
def test_answers_follow_the_order_of_the_nodes(router: str, num_nodes: int, seed: int) -> None:
    features, edges = random_graphs(2, num_nodes, seed)
    order = torch.randperm(num_nodes, generator=torch.Generator().manual_seed(seed))
    want = MODELS[router](features, edges)[:, order]
    torch.testing.assert_close(MODELS[router](features[:, order], edges[:, order][:, :, order]), want)


@pytest.mark.parametrize("router", MODELS)
def test_absent_nodes_and_other_graphs_have_no_effect(router: str) -> None:
    model = MODELS[router]
    features, edges = random_graphs(3, 9, seed=5)
    want = model(features[:1, :6], edges[:1, :6, :6])
    valid = (torch.arange(9) < 6).expand(3, 9)
    torch.testing.assert_close(model(features, edges, valid)[:1, :6], want)


@pytest.mark.parametrize("router", MODELS)
def test_an_edge_matters_and_its_direction_too(router: str) -> None:
    model = MODELS[router]
    features, edges = random_graphs(1, 8, seed=6)
    edges = edges & ~edges.transpose(1, 2)
    assert (model(features, edges) - model(features, torch.zeros_like(edges))).abs().max() > 1e-3
    assert (model(features, edges) - model(features, edges.transpose(1, 2))).abs().max() > 1e-3


def test_slots_attend_along_edges_of_their_nodes() -> None:
    """Two nodes a slot, edges from slot 0 to slot 1 alone: all that slot 0 is linked to is slot 1."""
    mixer = GraphMixer(dataclasses.replace(CONFIG, num_heads=1, num_memory_slots=3))
    shares = torch.eye(3)[[0, 0, 1, 1]][None, :, None]
    edges = torch.zeros(1, 4, 4)
    edges[0, 0, 2] = edges[0, 1, 3] = 1.0
    links = mixer.links(shares, edges)[0, 0].exp()
    torch.testing.assert_close(links[0], torch.tensor([0.0, 1.0, 0.0]), atol=1e-5, rtol=1e-5)
    assert links[2].tolist() == pytest.approx([1e-6] * 3)  # without edges: none is before another
    with_links = mixer.communication.weights(torch.randn(1, 1, 3, 32), links=mixer.links(shares, edges))
    assert with_links[0, 0, 0, 1] > 0.9


def test_nodes_without_writes_leave_the_learned_slots() -> None:
    mixer = GraphMixer(CONFIG)
    slots = mixer.write(torch.randn(2, 5, 2, 16), torch.zeros(2, 5, 2, 6))
    torch.testing.assert_close(slots, mixer.initial_slots.expand_as(slots))
    slots = mixer.write(torch.ones(2, 5, 2, 16), torch.full((2, 5, 2, 6), 20.0))
    torch.testing.assert_close(slots, torch.ones_like(slots))


@pytest.mark.parametrize("router", MODELS)
def test_shares_of_a_node_in_the_states_add_up_to_one(router: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mixer = next(module for module in MODELS[router].modules() if isinstance(module, GraphMixer))
    links, seen = mixer.links, []
    monkeypatch.setattr(mixer, "links", lambda shares, edges: (seen.append(shares), links(shares, edges))[1])
    MODELS[router](*random_graphs(2, 8, seed=7))
    torch.testing.assert_close(seen[0].sum(dim=-1), torch.ones(2, 8, CONFIG.num_heads).double(), atol=1e-4, rtol=0)
