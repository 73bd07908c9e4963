"""The worked example: the same model learns a task on graphs with their edges, and cannot without them."""

from __future__ import annotations

import torch

from examples.graph.__main__ import NUM_NODES, accuracy, train
from examples.graph.communities import NUM_COLOURS, draw_graphs

NUM_STEPS = 100


def test_only_with_edges_can_colours_be_told() -> None:
    """Without them two colours are left for a node, and larger communities are the better guess: about a half."""
    assert accuracy(train(NUM_STEPS, sees_edges=True), sees_edges=True) > 0.9
    assert 0.4 < accuracy(train(NUM_STEPS, sees_edges=False), sees_edges=False) < 0.65


def test_graphs_are_what_they_say() -> None:
    graphs = draw_graphs(50, NUM_NODES, torch.Generator().manual_seed(0))
    assert torch.equal(graphs.edges, graphs.edges.transpose(1, 2))
    assert not graphs.edges.diagonal(dim1=1, dim2=2).any()
    for features, labels, is_asked in zip(graphs.features, graphs.labels, graphs.is_asked, strict=True):
        labelled = features[~is_asked, :NUM_COLOURS].argmax(dim=-1)
        assert sorted(labelled.tolist()) == labels.unique().tolist()  # two nodes tell, each community's colour once
        assert not features[is_asked].any()
        assert min(int((labels == colour).sum()) for colour in labelled) >= NUM_NODES // 3
