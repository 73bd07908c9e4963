"""The suite of recurrences with baseline layers."""

from __future__ import annotations

import pytest

from nsm_core.layer_pattern import parse_layer_pattern
from nsm_core.model.nsm import NsmModel
from nsm_lab.baselines.register import BASELINES
from tests.nsm_core.model.recurrence_suite import *  # noqa: F403  the suite runs here
from tests.nsm_core.model.recurrence_suite import CONFIG, make_model, with_fields
from tests.nsm_lab.baselines.patterns import PATTERNS


@pytest.fixture(scope="module", params=PATTERNS)
def model(request: pytest.FixtureRequest) -> NsmModel:
    return make_model(with_fields(**PATTERNS[request.param]))


def test_the_suite_runs_with_every_baseline() -> None:
    assert {letter for fields in PATTERNS.values() for letter in str(fields["layer_pattern"])} == set(BASELINES)


def test_a_state_has_the_size_that_is_documented(model: NsmModel) -> None:
    """By the shapes of benchmarks/family/README.md."""
    d, heads, slots, width = CONFIG.d_model, CONFIG.num_heads, CONFIG.num_memory_slots, CONFIG.head_dim
    linformer = (16 * (CONFIG.max_context // 64) + 64) * 2 * d
    mamba2 = 2 * d * slots + 3 * (2 * d + 2 * slots)
    inner = heads * (model.config.slot_width or width)
    deltanet = slots * inner + 3 * (2 * heads * slots + inner)
    numbers = {
        "l": 2 * d, "f": linformer, "p": heads * 2 * slots * (width + 1), "r": d * width + d, "m": mamba2,
        "d": 2 * d * slots, "s": d, "g": deltanet,
    }  # fmt: skip
    plans = parse_layer_pattern(model.config.layer_pattern)
    layers = [plans[layer % len(plans)] for layer in range(model.config.num_layers)]
    assert model.state_spec.num_bytes == 8 + 4 * sum(numbers[kind] for plan in layers for kind in plan.kinds)
