"""R4 on the bundled model, in small: `python -m benchmarks.speculation --identity 1000` in large."""

from __future__ import annotations

import pytest

from benchmarks.speculation import Pair, check_identity, measure, openings, read_books
from nsm_core.execution.native.library import variants
from nsm_core.model.bundled import CHECKPOINTS
from nsm_core.model.loader import load_checkpoint
from tests.support.counts import scaled

pytestmark = pytest.mark.skipif(not variants(), reason="the native kernels were not built: there is no C++ compiler")


@pytest.fixture(scope="module")
def pair() -> Pair:
    return Pair(load_checkpoint(CHECKPOINTS / "pulse-books-small"))


def test_R4_requests_give_the_same_with_drafts_and_without(pair: Pair) -> None:
    stats = check_identity(pair, read_books(pair.encode), scaled(16, full=400))
    assert stats.num_accepted_tokens > 0


def test_what_is_measured(pair: Pair) -> None:
    prompts = openings(read_books(pair.encode), 2, 12)
    tally = measure(pair, prompts, "greedy, a passage twice", 2, 24)
    assert tally.num_tokens == 2 * 23
    assert 0 < tally.num_accepted <= tally.num_drafted
    assert measure(pair, prompts, "sampled", 1, 4).num_drafted == 0
