"""Slot memory for graphs: nodes are routed to states, states exchange along edges (examples/graph/README.md)."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nsm_core.config import ModelConfig
from nsm_core.model.block import SwiGlu
from nsm_core.model.communicating import Communication
from nsm_core.model.mixer import init_projections
from nsm_core.model.router import build_router

LEAST_SHARE = 1e-6  # of a node or an edge in a state, where logarithms are taken


class GraphMixer(nn.Module):
    """One round over a graph: nodes write to slots, slots exchange, nodes read.

    Edges come in at two places alone: the router sees a node beside the mean of its neighbours, and slots attend to
    each other by how many edges run between the nodes that wrote to them. Nothing depends on the order of nodes: what
    a slot takes is a mean over all of them, weighted by the router, in place of one step after the other.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        d, heads, head_dim = config.d_model, config.num_heads, config.head_dim
        self.heads, self.head_dim, self.eps = heads, head_dim, config.norm_eps
        self.project = nn.Linear(d, 4 * d, bias=False)  # q, k, v and the output gate
        self.neighbours = nn.Linear(d, d, bias=False)
        self.router = build_router(config)
        self.communication = Communication(config)
        slots = torch.zeros(heads, config.num_memory_slots, 2 * head_dim)
        slots[..., :head_dim].normal_(std=0.5)
        self.initial_slots = nn.Parameter(slots)
        self.log_scale = nn.Parameter(torch.zeros(heads))
        self.out_norm = nn.Parameter(torch.ones(d))
        self.out = nn.Linear(d, d, bias=False)
        init_projections(self.project, self.neighbours, out=self.out)

    def forward(self, x: Tensor, edges: Tensor, valid: Tensor) -> Tensor:
        """x [B,N,d]; edges [B,N,N] in [0, 1], from row to column; valid [B,N] bool: nodes that are there -> [B,N,d]."""
        q, k, v, gate = self.project(x).chunk(4, dim=-1)
        q, k = (F.rms_norm(self._by_head(part), (self.head_dim,), eps=self.eps) for part in (q, k))
        weights = self.route(x, edges, valid)
        shares = weights / (weights.sum(dim=-1, keepdim=True) + LEAST_SHARE)
        slots = self.write(torch.cat((k, self._by_head(v)), dim=-1), weights)
        slots = self.communication(slots, links=self.links(shares, edges))
        read = self.read(q, slots, shares)
        normed = F.rms_norm(read, (self.head_dim,), eps=self.eps).flatten(-2) * self.out_norm
        out: Tensor = self.out(normed * F.silu(gate))
        return out

    def route(self, x: Tensor, edges: Tensor, valid: Tensor) -> Tensor:
        """How much each node writes to each slot, [B,N,H,M], at least 0; nodes that are not there write nothing."""
        mean = edges @ x / edges.sum(dim=-1, keepdim=True).clamp(min=1.0)
        log_decay: Tensor = self.router(x + self.neighbours(mean), valid)
        return -log_decay

    def write(self, pairs: Tensor, weights: Tensor) -> Tensor:
        """pairs [B,N,H,2K], weights [B,N,H,M] -> slots [B,H,M,2K]: from their start towards the pairs' mean.

        The more comes, the further: as after writes one by one, whose decays multiply, but in no order.
        """
        total = weights.sum(dim=1)[..., None]  # [B,H,M,1]
        mean = torch.einsum("bnhm,bnhk->bhmk", weights, pairs) / (total + LEAST_SHARE)
        return torch.lerp(self.initial_slots.expand_as(mean), mean, -torch.expm1(-total))

    def links(self, shares: Tensor, edges: Tensor) -> Tensor:
        """[B,H,M,M]: the logarithm of which part of a slot's edges leads to which other."""
        between = torch.einsum("bnhm,bnp,bphl->bhml", shares, edges, shares)
        return (between / (between.sum(dim=-1, keepdim=True) + LEAST_SHARE) + LEAST_SHARE).log()

    def read(self, q: Tensor, slots: Tensor, shares: Tensor) -> Tensor:
        """q [B,N,H,K] -> [B,N,H,K]: slots that are like the query, above all those that the node itself wrote to."""
        keys, values = slots.chunk(2, dim=-1)
        scale = self.log_scale.exp() / math.sqrt(self.head_dim)
        alike = torch.einsum("bnhk,bhmk->bnhm", q, keys) * scale[:, None]
        weights = (alike + (shares + LEAST_SHARE).log()).softmax(dim=-1)
        return torch.einsum("bnhm,bhmk->bnhk", weights, values)

    def _by_head(self, x: Tensor) -> Tensor:
        return torch.unflatten(x, -1, (self.heads, self.head_dim))


class GraphNsm(nn.Module):
    """Features of nodes to logits of nodes, in `num_layers` rounds of the sizes that `config` names.

    With nodes in another order the answers are in that order, and no others.
    """

    def __init__(self, config: ModelConfig, *, num_features: int, num_labels: int) -> None:
        super().__init__()
        self.embed = nn.Linear(num_features, config.d_model)
        self.mixers = nn.ModuleList(GraphMixer(config) for _ in range(config.num_layers))
        self.mlps = nn.ModuleList(SwiGlu(config.d_model, config.mlp_hidden) for _ in range(config.num_layers))
        self.head = nn.Linear(config.d_model, num_labels)
        self.width, self.eps = config.d_model, config.norm_eps

    def forward(self, features: Tensor, edges: Tensor, valid: Tensor | None = None) -> Tensor:
        """features [B,N,F]; edges [B,N,N] bool or weights in [0, 1]; valid [B,N] bool (None: all) -> [B,N,labels]."""
        x = self.embed(features)
        valid = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device) if valid is None else valid
        edges = edges.to(x.dtype) * (valid[:, :, None] & valid[:, None, :])
        for mixer, mlp in zip(self.mixers, self.mlps, strict=True):
            x = x + mixer(self._normed(x), edges, valid)
            x = x + mlp(self._normed(x))
        logits: Tensor = self.head(self._normed(x))
        return logits

    def _normed(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (self.width,), eps=self.eps)
