"""Names of beginnings: the longest one is found, in one pass, and only by the tenant and model that made it."""

from __future__ import annotations

import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from service.stores.prefixes.keys import MIN_TOKENS, PromptDigests
from service.stores.prefixes.sightings import PrefixSightings
from tests.support.fakes import FakeBackend

MODEL = FakeBackend().model
IDS = tuple(range(1, 400))


def digests(
    ids: tuple[int, ...] = IDS, *, tenant: str = "a", fingerprint: str = "m", numerics: str = "n"
) -> PromptDigests:
    model = dataclasses.replace(MODEL, fingerprint=fingerprint, numerics=numerics)
    return PromptDigests(tenant=tenant, model=model, ids=ids)


@given(st.sets(st.integers(MIN_TOKENS, 399), max_size=8), st.integers(MIN_TOKENS, 399), st.integers(MIN_TOKENS, 399))
def test_the_longest_key_of_this_prompt_within_the_limit_is_found(stored: set[int], parts_at: int, limit: int) -> None:
    """`kept` are places of a prompt that is another one from `parts_at` on."""
    other = digests((*IDS[:parts_at], *(token_id + 1000 for token_id in IDS[parts_at:])))
    found = digests().longest([other.key(position) for position in stored], limit=limit)
    fitting = {position for position in stored if position <= min(parts_at, limit)}
    assert (found.position if found else 0) == max(fitting, default=0)


def test_L6_every_part_of_the_name_counts() -> None:
    key = digests().key(100)
    for other in (digests(tenant="b"), digests(fingerprint="x"), digests(numerics="x"), digests((2, *IDS[1:]))):
        assert other.key(100).digest != key.digest
        assert other.family != key.family
        assert other.longest([key], limit=399) is None
    assert digests(tenant="am", fingerprint="").family != digests(tenant="a", fingerprint="m").family


def test_a_shared_beginning_is_seen_by_the_second_prompt_and_by_no_other_tenant() -> None:
    sightings = PrefixSightings()
    other = (*IDS[:200], *(token_id + 1000 for token_id in IDS[200:]))
    assert sightings.record("a", digests()) == 0
    assert sightings.record("b", digests(tenant="b")) == 0
    assert sightings.record("a", digests(other)) == 192
    assert sightings.record("a", digests()) == 384
    assert sightings.record("a", digests(IDS[:384])) == 320  # something is left to read


def test_what_was_seen_long_ago_is_forgotten() -> None:
    sightings = PrefixSightings(max_per_tenant=2)
    sightings.record("a", digests())
    sightings.record("a", digests(tuple(range(1000, 1130))))
    assert sightings.record("a", digests(tuple(range(1000, 1130)))) == 128
    assert sightings.record("a", digests()) == 0
