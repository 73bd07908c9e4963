"""Graphs of two communities in which one node of each tells its colour: what colour has everybody else's?

A node that tells nothing has no feature at all, so nothing but the edges says to whom it belongs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

NUM_COLOURS = 4
EDGE_WITHIN, EDGE_BETWEEN = 0.5, 0.04  # how likely two nodes of one community, or of two, are connected


class Graphs(NamedTuple):
    """features [B,N,colours + 1]: the colour of nodes that tell it, and that they do; edges [B,N,N] bool, symmetric;
    labels [B,N]: the colour of the node's community; is_asked [B,N] bool: nodes that tell nothing.
    """

    features: Tensor
    edges: Tensor
    labels: Tensor
    is_asked: Tensor


def draw_graphs(num_graphs: int, num_nodes: int, generator: torch.Generator) -> Graphs:
    """Nodes in a random order, communities of random sizes of at least a third."""

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator)

    order = uniform(num_graphs, num_nodes).argsort(dim=1)
    first = (num_nodes * (1 + uniform(num_graphs, 1)) / 3).long()
    community = (order >= first).long()
    colours = uniform(num_graphs, NUM_COLOURS).argsort(dim=1)[:, :2]
    labels = colours.gather(1, community)
    is_labelled = (order == 0) | (order == first)
    features = torch.nn.functional.one_hot(labels, NUM_COLOURS) * is_labelled[..., None]
    is_same = community[:, :, None] == community[:, None, :]
    drawn = uniform(num_graphs, num_nodes, num_nodes) < torch.where(is_same, EDGE_WITHIN, EDGE_BETWEEN)
    upper = drawn.triu(1)
    return Graphs(
        torch.cat((features, is_labelled[..., None]), dim=-1).float(),
        upper | upper.transpose(1, 2),
        labels,
        ~is_labelled,
    )
