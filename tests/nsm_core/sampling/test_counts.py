from __future__ import annotations

import pytest

from nsm_core.sampling.counts import TokenCounts


def test_counts_are_a_mapping_of_the_added_tokens() -> None:
    counts = TokenCounts(10, {3: 2, 9: 1})
    counts.add(3)
    counts.add(0)
    assert dict(counts) == {0: 1, 3: 3, 9: 1}
    assert len(counts) == 3
    assert counts == {0: 1, 3: 3, 9: 1}
    assert all(type(key) is int and type(value) is int for key, value in counts.items())


def test_a_token_taken_back_is_as_if_never_sampled() -> None:
    counts = TokenCounts(10)
    counts.add(4)
    counts.remove(4)
    assert dict(counts) == {}
    assert 4 not in counts
    assert not counts
    with pytest.raises(KeyError):
        counts.remove(4)


def test_a_token_never_sampled_has_no_entry() -> None:
    counts = TokenCounts(10, {3: 2})
    assert counts.get(5) is None
    assert 10 not in counts
    assert -7 not in counts


def test_nonzero_gives_ids_and_counts_side_by_side() -> None:
    ids, nums = TokenCounts(10, {9: 1, 3: 2}).nonzero()
    assert ids.tolist() == [3, 9]
    assert nums.tolist() == [2, 1]
