"""Pairs that are asked for later: what a text asks, and what is measured of a model."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from benchmarks.quality import far_pairs
from nsm_core.model.nsm import NsmModel
from nsm_core.state.spec import POSITION, State
from nsm_lab.baselines.register import register_baselines


@pytest.fixture
def texts() -> far_pairs.Texts:
    return far_pairs.make_texts(np.random.default_rng(0), 3)


def test_a_question_repeats_the_key_of_a_pair_whose_value_is_due(texts: far_pairs.Texts) -> None:
    row, position = np.nonzero(texts.targets != far_pairs.NOT_ASKED)
    assert len(row) > 100
    stated = position - texts.distances[row, position]
    assert np.array_equal(texts.ids[row, stated], texts.ids[row, position])
    assert np.array_equal(texts.ids[row, stated + 1], texts.targets[row, position])


def test_a_key_stands_nowhere_between_its_pair_and_its_question(texts: far_pairs.Texts) -> None:
    for row, position in zip(*np.nonzero(texts.targets != far_pairs.NOT_ASKED), strict=True):
        between = texts.ids[row, position - texts.distances[row, position] + 1 : position]
        assert texts.ids[row, position] not in between


def test_distances_reach_past_a_row_and_stay_in_their_range(texts: far_pairs.Texts) -> None:
    distances = texts.distances[texts.targets != far_pairs.NOT_ASKED]
    low, high = far_pairs.DISTANCES
    assert distances.min() >= low
    assert far_pairs.ROW < distances.max() <= high


def test_arms_have_equal_parameters_and_all_but_two_equal_states() -> None:
    register_baselines()
    parameters, states = [], {}
    for arm in far_pairs.ARMS:
        with torch.device("meta"):
            model = NsmModel(far_pairs.model_config(arm))
        parameters.append(sum(value.numel() for value in model.parameters()))
        states[arm] = model.state_spec.num_bytes
    assert max(parameters) < 1.002 * min(parameters)
    larger = [states.pop(arm) for arm in ("GRU gates", "slot memory, 96 slots")]
    assert max(larger) < 1.02 * min(larger)
    assert max(states.values()) < 1.1 * min(states.values())


def test_a_model_that_knows_nothing_gains_nothing(texts: far_pairs.Texts) -> None:
    torch.manual_seed(0)
    model = NsmModel(far_pairs.model_config("slot memory"))
    with torch.no_grad():
        model.embedding.weight[: far_pairs.KEYS].zero_()
        model.final_norm.weight.zero_()
    cells = far_pairs.measure(model, texts)
    assert sum(cell["questions"] for cell in cells) == (texts.targets != far_pairs.NOT_ASKED).sum()
    guess = math.log(far_pairs.VALUES) - math.log(model.config.vocab_size)  # all tokens alike
    assert [cell["gain"] for cell in cells] == pytest.approx([guess] * len(cells))


def test_rows_of_a_text_go_on_from_the_state_of_the_row_before(monkeypatch: pytest.MonkeyPatch) -> None:
    training = far_pairs.Training(far_pairs.FarRun(arm="keyed slots", seed=0, steps=5, rows=1, lr=1e-3))
    read, positions = training.model.read, []

    def noted(ids: torch.Tensor, state: State) -> tuple[torch.Tensor, State]:
        positions.append(int(state[POSITION]))
        return read(ids, state)

    monkeypatch.setattr(training.model, "read", noted)
    losses = list(training.losses())
    assert positions == [0, 1024, 2048, 3072, 0]
    assert all(math.isfinite(loss) for loss in losses)


def test_a_run_is_a_row_with_gains_and_right_answers() -> None:
    cells = [{"gain": 1.5, "right": 0.5}] * (len(far_pairs.EDGES) - 1)
    result = {
        "run": {"arm": "windows", "steps": 400, "seed": 1, "lr": 0.003},
        "parameters": 1000,
        "state_bytes": 2048,
        "tokens_s": 5000.4,
        "loss": 0.123,
        "cells": cells,
    }
    lines = far_pairs.markdown([result]).splitlines()
    assert lines[0].endswith("| 1,024–2,048 | 2,048–3,000 |")
    assert lines[2].startswith("| windows | 0.003 | 400 | 1 | 1,000 | 2 | 5,000 | 0.12 | 1.50 (50%) |")
