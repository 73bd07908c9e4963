from __future__ import annotations

import pytest
import torch

from nsm_core.errors import InvalidRequest
from nsm_core.inspection.reading import inspect
from nsm_lab.inspection.clusters import cluster, cluster_states
from tests.support.models import random_model, small_config

MIDDLES = torch.tensor([[5.0, 0.0], [0.0, 5.0], [-5.0, -5.0]])


def test_groups_that_are_there_are_found_and_numbered_by_their_first() -> None:
    members = torch.tensor([2, 0, 1, 1, 2, 0, 0, 2])
    points = MIDDLES[members] + 0.1 * torch.randn(8, 2, generator=torch.Generator().manual_seed(0))
    found = cluster(points, 3)
    assert found.labels.tolist() == [0, 1, 2, 2, 0, 1, 1, 0]
    torch.testing.assert_close(found.centres, MIDDLES[[2, 0, 1]], rtol=0, atol=0.2)
    assert found.silhouette > 0.9
    assert cluster(points, 3).labels.tolist() == found.labels.tolist()


def test_where_there_are_no_groups_the_silhouette_says_so() -> None:
    points = torch.rand(40, 6, generator=torch.Generator().manual_seed(1))
    assert cluster(points, 4).silhouette < 0.3
    assert cluster(points, 1).silhouette == 0


@pytest.mark.parametrize("points", [torch.zeros(5, 3), torch.eye(5)])
def test_equal_points_and_as_many_clusters_as_points_are_fine(points: torch.Tensor) -> None:
    for count in (1, 3, 5):
        found = cluster(points, count)
        assert found.labels.shape == (5,)
        assert found.centres.shape == (count, 3 if points.sum() == 0 else 5)
        assert bool(found.centres.isfinite().all())


@pytest.mark.parametrize("by", ["content", "use"])
def test_states_of_a_layer_are_grouped(by: str) -> None:
    ids = torch.randint(64, (20,), generator=torch.Generator().manual_seed(2)).tolist()
    (layer,) = inspect(random_model(small_config(64, num_layers=1)), ids).layers
    found = cluster_states(layer, 3, by=by)
    assert found.labels.shape == (8,)
    assert set(found.labels.tolist()) <= {0, 1, 2}


def test_a_number_of_clusters_that_cannot_be_is_refused() -> None:
    for count in (0, 6):
        with pytest.raises(InvalidRequest, match=r"num_clusters must be in \[1, 5\]"):
            cluster(torch.eye(5), count)
    (layer,) = inspect(random_model(small_config(64, num_layers=1, layer_pattern="W")), [1]).layers
    for by in ("content", "use"):
        with pytest.raises(InvalidRequest, match="attention"):
            cluster_states(layer, 1, by=by)
