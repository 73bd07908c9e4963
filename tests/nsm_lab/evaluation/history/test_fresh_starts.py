from __future__ import annotations

import math

import numpy as np
import pytest

from nsm_core.errors import ConfigError
from nsm_lab.evaluation.history.fresh_starts import measure_fresh_starts
from tests.nsm_lab.evaluation.history.memories import VOCAB, Memory, random_texts

SPAN_LEN = 40


def texts_that_end_as_they_began(count: int) -> list[np.ndarray]:
    """The span at 400 says again what stands at 20: before every fresh start."""
    texts = random_texts(count, 400 + SPAN_LEN)
    for tokens in texts:
        tokens[397:] = tokens[17 : 20 + SPAN_LEN]
    return texts


def test_fresh_starts_oracle_memory_gains_what_only_the_whole_history_holds() -> None:
    result = measure_fresh_starts(
        Memory(8192), texts_that_end_as_they_began(3), reach=100, starts=(50, 200), spans=(400,), span_len=SPAN_LEN
    )
    assert result.loss.mean == pytest.approx(0.0, abs=1e-3)
    assert [one.is_beyond_windows for one in result.starts] == [False, True]
    for one in result.starts:
        assert one.gain.mean == pytest.approx(math.log(VOCAB), rel=0.05)
        assert one.gain.exceeds(0.0)


def test_fresh_starts_memoryless_model_gains_exactly_nothing() -> None:
    result = measure_fresh_starts(
        Memory(0, noise=True), texts_that_end_as_they_began(3), reach=0, starts=(50,), spans=(400,), span_len=SPAN_LEN
    )
    assert result.starts[0].gain.mean == 0.0
    assert not result.starts[0].gain.exceeds(0.0)


def test_fresh_starts_need_as_much_history_again_and_long_enough_documents() -> None:
    texts = [*random_texts(2, 500), *random_texts(3, 240), *random_texts(1, 90)]
    result = measure_fresh_starts(
        Memory(0), texts, reach=0, starts=(50, 150, 300), spans=(100, 200, 400), span_len=SPAN_LEN
    )
    assert [(one.start, len(one.gain.per_document)) for one in result.starts] == [(50, 5), (150, 2)]
    assert len(result.loss.per_document) == 5
    with pytest.raises(ConfigError, match="no document is long enough for a span and a fresh start before it"):
        measure_fresh_starts(Memory(0), random_texts(1, 100), reach=0)
