"""What a layer pattern may say."""

from __future__ import annotations

import pytest

from nsm_core.errors import ConfigError
from nsm_core.layer_pattern import LayerPlan, parse_layer_pattern


def test_letters_and_groups_become_layers() -> None:
    assert parse_layer_pattern("NN[NW](WNL)A") == (
        LayerPlan("N"),
        LayerPlan("N"),
        LayerPlan("NW", in_parallel=True),
        LayerPlan("WNL"),
        LayerPlan("A"),
    )


@pytest.mark.parametrize("pattern", ["", "X", "NX", "[N]", "(N", "N)", "[NW)", "(N[NW])", "N W", "é"])
def test_anything_else_is_refused_with_what_was_given(pattern: str) -> None:
    with pytest.raises(ConfigError, match="layer_pattern must be made of the letters N, C, G, K, L, W, A"):
        parse_layer_pattern(pattern)
