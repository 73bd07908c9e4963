from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from nsm_core.errors import ConfigError
from nsm_core.model.nsm import NsmModel
from nsm_core.state.quantize import StateFormat, stored_bytes
from nsm_lab.evaluation.perplexity import EncodedDocument
from nsm_lab.evaluation.stored_state_quality import measure_stored_states, stored_state


@pytest.fixture(autouse=True)
def short_edges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nsm_lab.evaluation.stored_state_quality.EDGES", (0, 4, 24))


def document(length: int, seed: int) -> EncodedDocument:
    tokens = np.random.default_rng(seed).integers(1, 400, length + 1)
    ones = np.ones(length, np.int64)
    return EncodedDocument(tokens=tokens, num_bytes=ones, num_words=ones)


def test_unrounded_states_cost_nothing_and_coarser_ones_more(any_model: NsmModel) -> None:
    texts = [document(70, seed) for seed in range(3)]
    result = measure_stored_states(any_model, texts, prefix_len=20, max_saves=2, max_rows=2)
    assert (result.num_documents, result.num_saves) == (3, 2)
    exact, half, int8 = result.formats
    assert [bucket.change for bucket in exact.buckets] == [0.0, 0.0, 0.0]
    assert [(b.start, b.stop, b.num_tokens) for b in half.buckets] == [(0, 4, 24), (4, 24, 120), (0, 24, 144)]
    assert 0.0 < abs(half.buckets[-1].change) < 1e-3
    assert abs(int8.buckets[-1].change) < 0.05
    spread = [max(abs(b.nats - b.exact_nats) for b in stored.buckets) for stored in result.formats]
    assert spread[0] == 0.0 < spread[1] < spread[2]
    for stored in result.formats:
        layout = any_model.state_spec.layout()
        assert stored.state_bytes == stored_bytes(layout, StateFormat(stored.format))
        assert all(bucket.low <= bucket.change <= bucket.high for bucket in stored.buckets)


def test_numbers_are_those_of_reading_on_from_the_rounded_state(model: NsmModel) -> None:
    text = document(50, seed=1)
    result = measure_stored_states(model, [text], prefix_len=20, max_saves=1, formats=(StateFormat.INT8,))
    ids = torch.from_numpy(text.tokens)[None]
    with torch.no_grad():
        _, state = model(ids[:, :20], model.initial_state(1))
        hidden, _ = model(ids[:, 20:44], stored_state(model.state_spec, state, StateFormat.INT8))
        want = F.cross_entropy(model.logits(hidden)[0], ids[0, 21:45], reduction="none")
    first, _, whole = result.formats[0].buckets
    assert first.nats == pytest.approx(float(want[:4].sum()), rel=1e-5)
    assert whole.nats == pytest.approx(float(want.sum()), rel=1e-5)
    assert whole.change == pytest.approx(np.expm1((whole.nats - whole.exact_nats) / 24), rel=1e-3)


@pytest.mark.parametrize("state_format", list(StateFormat))
def test_a_stored_state_has_the_same_rows_names_and_dtypes(any_model: NsmModel, state_format: StateFormat) -> None:
    with torch.no_grad():
        _, state = any_model(torch.randint(1, 400, (3, 20)), any_model.initial_state(3))
    stored = stored_state(any_model.state_spec, state, state_format)
    assert list(stored) == list(state)
    for name, value in stored.items():
        assert (value.shape, value.dtype) == (state[name].shape, state[name].dtype)
        tolerance = {StateFormat.FP32: 0.0, StateFormat.FP16: 1e-3, StateFormat.INT8: 1e-2}[state_format]
        assert (value - state[name]).abs().max() <= tolerance * state[name].abs().max()


def test_short_documents_take_no_part_and_the_shortest_of_the_others_decides(model: NsmModel) -> None:
    result = measure_stored_states(
        model, [document(30, 0), document(66, 1), document(300, 2)], prefix_len=20, max_saves=9
    )
    assert (result.num_documents, result.num_saves) == (2, 2)
    with pytest.raises(ConfigError, match="stored_states needs a document of 44 tokens, the longest has 30"):
        measure_stored_states(model, [document(30, 0)], prefix_len=20)
