from __future__ import annotations

import logging

import pytest

from nsm_core.engine.slow_steps import MANY_IN_A_ROW, SLOW_STEP_S, SlowSteps
from nsm_core.tokenizer import Tokenizer
from tests.nsm_core.engine.harness import make_engine, make_request, run_one, small_model

SLOW, FAST = 2 * SLOW_STEP_S, SLOW_STEP_S / 2


def test_X15_several_slow_steps_in_a_row_are_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    steps = SlowSteps()
    with caplog.at_level(logging.INFO, "nsm.engine"):
        for seconds in [*[SLOW] * (MANY_IN_A_ROW - 1), FAST, *[SLOW] * (MANY_IN_A_ROW + 2), FAST, FAST]:
            steps.record(seconds)
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    assert f"the last {MANY_IN_A_ROW} steps took {SLOW:.1f} s on average" in caplog.text
    assert f"after {MANY_IN_A_ROW + 2} slow ones" in caplog.text
    assert steps.total == 2 * MANY_IN_A_ROW + 1


def test_X15_the_engine_counts_its_slow_steps(tiny_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(small_model(), tiny_tokenizer)
    monkeypatch.setattr("nsm_core.engine.slow_steps.SLOW_STEP_S", 0.0)
    run_one(engine, make_request(max_tokens=3))
    assert engine.stats().num_slow_steps == engine.stats().num_steps == 3
