"""Groups of states that hold, or do, much the same: k-means, with a start that is no chance."""

from __future__ import annotations

import dataclasses
from typing import Literal

import torch
from torch import Tensor

from nsm_core.errors import InvalidRequest
from nsm_core.inspection.figures import write_of
from nsm_core.inspection.reading import LayerActivity

MAX_ROUNDS = 100


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Clusters:
    """`labels` [N] int64: which cluster each of N things is in, numbered by their first member. `centres` [k, D].

    `silhouette` in [-1, 1]: how much nearer things are to their own cluster than to the next; about 0: there are none.
    """

    labels: Tensor
    centres: Tensor
    silhouette: float


def cluster_states(layer: LayerActivity, num_clusters: int, *, by: Literal["content", "use"] = "content") -> Clusters:
    """Clusters the M states of a layer, all their heads together: by the direction of their content at the text's
    end, or by the tokens that wrote to them. Raises InvalidRequest.
    """
    if by == "use":
        profiles = write_of(layer).sum(dim=1).T  # [M,T]
    elif layer.trajectory is None:
        raise InvalidRequest(f"layer {layer.name} ({layer.kind}) has no states to group", param="layer")
    else:
        profiles = layer.trajectory.end.transpose(0, 1).flatten(1)  # [M, H * D]
    return cluster(torch.nn.functional.normalize(profiles, dim=-1), num_clusters)


def cluster(points: Tensor, num_clusters: int) -> Clusters:
    """points [N, D], 1 <= num_clusters <= N. Equal points give equal clusters, on any machine up to rounding.

    Lloyd's rounds from centres that are far apart: first the point farthest from the mean, then each time the one
    farthest from all so far. Raises InvalidRequest.
    """
    if not 1 <= num_clusters <= len(points):
        raise InvalidRequest(f"num_clusters must be in [1, {len(points)}], got {num_clusters}", param="num_clusters")
    points = points.double()
    centres = _far_apart(points, num_clusters)
    labels = torch.cdist(points, centres).argmin(dim=-1)
    for _ in range(MAX_ROUNDS):
        centres = torch.stack([_mean_of(points, labels == index, centres[index]) for index in range(num_clusters)])
        new_labels = torch.cdist(points, centres).argmin(dim=-1)
        if torch.equal(new_labels, labels):
            break
        labels = new_labels
    labels, order = _numbered_by_first(labels, num_clusters)
    return Clusters(labels=labels, centres=centres[order].float(), silhouette=_silhouette(points, labels))


def _far_apart(points: Tensor, count: int) -> Tensor:
    chosen = [int((points - points.mean(dim=0)).norm(dim=-1).argmax())]
    while len(chosen) < count:
        chosen.append(int(torch.cdist(points, points[chosen]).amin(dim=-1).argmax()))
    return points[chosen]


def _mean_of(points: Tensor, members: Tensor, otherwise: Tensor) -> Tensor:
    return points[members].mean(dim=0) if bool(members.any()) else otherwise


def _numbered_by_first(labels: Tensor, count: int) -> tuple[Tensor, list[int]]:
    """The labels by the order in which they come up, and the old number of each new one; empty clusters last."""
    order = list(dict.fromkeys(labels.tolist()))
    order += [index for index in range(count) if index not in order]
    renamed = {old: new for new, old in enumerate(order)}
    return torch.tensor([renamed[label] for label in labels.tolist()]), order


def _silhouette(points: Tensor, labels: Tensor) -> float:
    """Mean of (b - a) / max(a, b): a the mean distance to its cluster's others, b that to the nearest other cluster."""
    members = torch.nn.functional.one_hot(labels).double()
    sizes = members.sum(dim=0)
    if len(sizes) < 2:
        return 0.0
    total = torch.cdist(points, points) @ members
    is_own = members.bool()
    own = total[is_own] / (sizes[labels] - 1).clamp(min=1)
    other = (total / sizes).masked_fill(is_own, torch.inf).amin(dim=-1)
    score = (other - own) / torch.maximum(own, other).clamp(min=1e-12)
    return float(torch.where(sizes[labels] > 1, score, 0.0).mean())
