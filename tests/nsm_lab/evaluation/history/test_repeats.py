from __future__ import annotations

import math

import pytest
import torch

from nsm_core.errors import ConfigError
from nsm_core.model.nsm import NsmModel
from nsm_lab.evaluation.history import repeats
from nsm_lab.evaluation.history.repeats import measure_repeats
from tests.nsm_lab.evaluation.history.memories import VOCAB, Memory, random_texts

DISTANCES = (64, 128, 300)


def test_repeats_oracle_memory_gains_everything_that_can_be_remembered() -> None:
    """All but the passage's first three tokens, which nothing announces."""
    result = measure_repeats(
        Memory(8192), random_texts(3, 2000), reach=0, distances=DISTANCES, passages=2, passage_len=32
    )
    assert [one.distance for one in result.distances] == list(DISTANCES)
    for one in result.distances:
        assert one.gain.mean == pytest.approx(math.log(VOCAB) * 29 / 32, rel=0.02)
        assert one.gain.exceeds(0.0)
        assert len(one.gain.per_document) == 3
    assert result.unread_loss.mean == pytest.approx(math.log(VOCAB), rel=0.05)


def test_repeats_memoryless_model_gains_exactly_nothing() -> None:
    result = measure_repeats(
        Memory(0, noise=True), random_texts(3, 900), reach=0, distances=DISTANCES, passages=1, passage_len=32
    )
    for one in result.distances:
        assert one.gain.mean == 0.0
        assert not one.gain.exceeds(0.0)


def test_repeats_model_with_a_window_gains_within_it_only() -> None:
    result = measure_repeats(
        Memory(150), random_texts(3, 2000), reach=150, distances=DISTANCES, passages=1, passage_len=32
    )
    near, middle, far = result.distances
    assert (near.is_beyond_windows, middle.is_beyond_windows, far.is_beyond_windows) == (False, False, True)
    assert near.gain.exceeds(0.0)
    assert middle.gain.exceeds(0.0)
    assert abs(far.gain.mean) < 0.05


def test_repeats_losses_are_those_of_texts_read_whole(any_model: NsmModel) -> None:
    """The state that is read once for all distances gives what reading each text from its start gives."""
    passage_len, distance = 24, 100
    (tokens,) = random_texts(1, repeats.LEAD + distance + passage_len, seed=2)
    tokens = tokens % any_model.config.vocab_size
    result = measure_repeats(
        any_model, [tokens], reach=0, distances=(50, distance), passages=1, passage_len=passage_len
    )
    overwritten = tokens.copy()
    overwritten[repeats.LEAD : repeats.LEAD + passage_len] = tokens[-passage_len:]
    losses = [_passage_loss(any_model, text, passage_len) for text in (tokens, overwritten)]
    assert result.unread_loss.mean == pytest.approx(losses[0], rel=1e-4)
    assert result.distances[1].gain.mean == pytest.approx(losses[0] - losses[1], abs=2e-4)


def _passage_loss(model: NsmModel, tokens: object, passage_len: int) -> float:
    ids = torch.as_tensor(tokens)[None]
    with torch.no_grad():
        hidden, _ = model.eval()(ids, model.initial_state(1))
        logits = model.logits(hidden)[0, -passage_len - 1 : -1]
    return float(torch.nn.functional.cross_entropy(logits, ids[0, -passage_len:]))


def test_repeats_short_documents_leave_out_the_distances_they_have_no_room_for() -> None:
    texts = [*random_texts(2, 1000), *random_texts(2, 620, seed=5), *random_texts(1, 100)]
    result = measure_repeats(Memory(8192), texts, reach=0, distances=(64, 300), passages=1, passage_len=32)
    assert [len(one.gain.per_document) for one in result.distances] == [4, 2]


def test_repeats_without_a_document_that_is_long_enough_is_an_error() -> None:
    with pytest.raises(ConfigError, match="no document is long enough for a passage that is repeated 64 tokens later"):
        measure_repeats(Memory(0), random_texts(1, 100), reach=0, distances=(64,), passage_len=32)
    with pytest.raises(ConfigError, match="repeat distances must be above the passage's 256 tokens, got 256"):
        measure_repeats(Memory(0), random_texts(1, 100), reach=0, distances=(256,))
