from __future__ import annotations

import os

from nsm_core import random_ids
from nsm_core.random_ids import NUM_AT_ONCE, random_bits, random_id


def test_ids_differ_and_are_32_hexadecimal_digits() -> None:
    ids = {random_id() for _ in range(3 * NUM_AT_ONCE)}
    assert len(ids) == 3 * NUM_AT_ONCE
    assert all(len(one) == 32 and int(one, 16) >= 0 for one in ids)


def test_bits_are_within_their_number_and_reach_all_of_it() -> None:
    drawn = [random_bits(64) for _ in range(500)]
    assert all(0 <= bits < 2**64 for bits in drawn)
    assert {bits >> 62 for bits in drawn} == {0, 1, 2, 3}
    assert {random_bits(1) for _ in range(200)} == {0, 1}


def test_a_forked_process_takes_none_that_its_parent_will_take() -> None:
    random_id()
    assert random_ids._ready
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, b"%d" % len(random_ids._ready))
        os._exit(0)
    os.waitpid(child, 0)
    with open(reading, "rb", closefd=True) as pipe:
        os.close(writing)
        assert pipe.read() == b"0"
