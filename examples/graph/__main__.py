"""Trains a graph model twice, with the edges and without them: `python -m examples.graph`."""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F

from examples.graph.communities import NUM_COLOURS, Graphs, draw_graphs
from nsm_core.config import ModelConfig
from nsm_lab.graph import GraphNsm

CONFIG = ModelConfig(d_model=32, num_layers=3, num_heads=2, num_memory_slots=8, write_top_k=4, mlp_hidden=64)
NUM_NODES = 18
BATCH = 32
LEARNING_RATE = 5e-3


def answers(model: GraphNsm, graphs: Graphs, *, sees_edges: bool) -> torch.Tensor:
    """Logits [B,N,colours]."""
    edges = graphs.edges if sees_edges else torch.zeros_like(graphs.edges)
    logits: torch.Tensor = model(graphs.features, edges)
    return logits


def train(num_steps: int, *, sees_edges: bool, seed: int = 0) -> GraphNsm:
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = GraphNsm(CONFIG, num_features=NUM_COLOURS + 1, num_labels=NUM_COLOURS)
    optimiser = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, LEARNING_RATE, total_steps=num_steps)
    for _ in range(num_steps):
        graphs = draw_graphs(BATCH, NUM_NODES, generator)
        logits = answers(model, graphs, sees_edges=sees_edges)
        loss = F.cross_entropy(logits[graphs.is_asked], graphs.labels[graphs.is_asked])
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
    return model.eval()


@torch.inference_mode()
def accuracy(model: GraphNsm, *, sees_edges: bool, num_graphs: int = 256, num_nodes: int = NUM_NODES) -> float:
    """Of the nodes that are asked, in graphs that training has not seen."""
    graphs = draw_graphs(num_graphs, num_nodes, torch.Generator().manual_seed(1_000_003))
    found = answers(model, graphs, sees_edges=sees_edges).argmax(dim=-1)
    return float((found == graphs.labels)[graphs.is_asked].float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    steps = parser.parse_args().steps
    for sees_edges in (True, False):
        model = train(steps, sees_edges=sees_edges)
        right = accuracy(model, sees_edges=sees_edges)
        print(f"{'with' if sees_edges else 'without'} edges: {right:.1%} of the nodes have the right colour")
        if sees_edges:
            larger = accuracy(model, sees_edges=True, num_nodes=2 * NUM_NODES)
            print(f"  in graphs twice as large: {larger:.1%}")


if __name__ == "__main__":
    main()
