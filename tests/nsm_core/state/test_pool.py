"""Rows are leased to one owner; a free row cannot be read, and reads as poison if it is."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nsm_core.errors import SnapshotCorrupt
from nsm_core.state.pages import CACHE_LINE_BYTES, HUGE_PAGE_BYTES, Pages
from nsm_core.state.pool import POISON_INT, StatePool
from nsm_core.state.spec import State, StateSpec, TensorSpec

SPEC = StateSpec((TensorSpec("position", (), torch.int64), TensorSpec("slots", (2, 3), torch.float32)))


def make_state(*values: int) -> State:
    column = torch.tensor(values)
    return {"position": column, "slots": column.float()[:, None, None].expand(-1, 2, 3).clone()}


def make_pool(num_rows: int = 4, leased: tuple[int, ...] = (), *, poison: bool = True) -> StatePool:
    pool = StatePool(SPEC, num_rows, poison=poison)
    for row in leased:
        pool.lease(row)
    return pool


@pytest.mark.parametrize("rows", [(0,), (1, 2), (2, 0), (0, 1, 3), (3, 2, 1, 0)], ids=str)
def test_what_is_scattered_comes_back_in_the_order_asked_for(rows: tuple[int, ...]) -> None:
    pool = make_pool(leased=rows)
    pool.scatter(rows, make_state(*(10 + row for row in rows)))
    assert pool.gather(rows)["position"].tolist() == [10 + row for row in rows]
    assert pool.gather(tuple(sorted(rows)))["slots"][:, 0, 0].tolist() == [10 + row for row in sorted(rows)]


@pytest.mark.parametrize("rows", [(0,), (0, 1, 2), (0, 2, 3), (1, 3)], ids=str)
def test_one_state_fills_rows(rows: tuple[int, ...]) -> None:
    pool = make_pool(leased=rows)
    pool.fill(rows, make_state(7))
    assert pool.gather(rows)["position"].tolist() == [7] * len(rows)
    assert pool.gather(rows)["slots"].eq(7).all()


def test_write_and_scatter_copy_in() -> None:
    pool = make_pool(leased=(1,))
    given_state = make_state(5)
    pool.write(1, given_state)
    given_state["slots"].fill_(9)
    assert pool.gather((1,))["slots"].unique().tolist() == [5]


def test_copy_has_memory_of_its_own() -> None:
    pool = make_pool(leased=(1,))
    pool.write(1, make_state(5))
    copied = pool.copy(1)
    pool.write(1, make_state(6))
    assert copied["position"].tolist() == [5]
    assert copied["slots"].unique().tolist() == [5]


@pytest.mark.parametrize("rows", [(1, 2), (3, 0)], ids=str)
def test_what_is_held_in_fewer_bits_is_rounded_once(rows: tuple[int, ...]) -> None:
    pool = StatePool(SPEC, 4, poison=True, held_as={"slots": torch.bfloat16})
    assert pool.num_bytes == 4 * (8 + 2 * 6)
    for row in rows:
        pool.lease(row)
    state = make_state(5, 6)
    state["slots"] += torch.rand(2, 2, 3)
    pool.scatter(rows, state)
    held = pool.gather(rows)
    assert held["slots"].dtype == torch.float32
    assert held["slots"].equal(state["slots"].bfloat16().float())
    packed = pool.pack(rows[0])
    assert packed == SPEC.pack(held)
    pool.write(rows[0], SPEC.unpack(packed))
    assert pool.pack(rows[0]) == packed
    pool.unpack(rows[1], SPEC.pack(state))
    assert pool.pack(rows[1]) == packed


def test_pack_is_the_bytes_of_one_row() -> None:
    pool = make_pool(leased=(0, 1, 2))
    pool.scatter((0, 1, 2), make_state(7, 8, 9))
    assert pool.pack(1) == SPEC.pack(make_state(8))
    assert len(pool.pack(1)) == SPEC.num_bytes
    assert pool.num_bytes == 4 * SPEC.num_bytes


def test_unpacked_bytes_are_the_content_of_one_row() -> None:
    pool = make_pool(leased=(0, 1, 2))
    pool.scatter((0, 1, 2), make_state(7, 8, 9))
    pool.unpack(1, SPEC.pack(make_state(5)))
    assert pool.gather((0, 1, 2))["slots"].unique().tolist() == [5, 7, 9]
    assert pool.pack(1) == SPEC.pack(make_state(5))


def test_bytes_of_another_length_and_rows_that_are_free_are_refused() -> None:
    pool = make_pool(leased=(1,))
    with pytest.raises(SnapshotCorrupt):
        pool.unpack(1, SPEC.pack(make_state(5))[:-1])
    with pytest.raises(RuntimeError, match="leased"):
        pool.unpack(0, SPEC.pack(make_state(5)))


@pytest.mark.parametrize("row", [-1, 4])
def test_a_row_that_does_not_exist_cannot_be_leased(row: int) -> None:
    with pytest.raises(RuntimeError, match="rows 0 to 3"):
        make_pool().lease(row)


def test_a_row_has_one_owner_and_is_freed_once() -> None:
    pool = make_pool(leased=(2,))
    with pytest.raises(RuntimeError, match="leased already"):
        pool.lease(2)
    pool.free(2)
    with pytest.raises(RuntimeError, match="must be leased"):
        pool.free(2)


@pytest.mark.parametrize("rows", [(0,), (0, 1), (1, 1), ()], ids=str)
def test_only_leased_and_distinct_rows_are_read_and_written(rows: tuple[int, ...]) -> None:
    pool = make_pool(leased=(1,))
    with pytest.raises(RuntimeError, match="leased and distinct"):
        pool.gather(rows)
    with pytest.raises(RuntimeError, match="leased and distinct"):
        pool.scatter(rows, make_state(*rows))


def test_a_free_row_is_not_packed() -> None:
    with pytest.raises(RuntimeError, match="must be leased"):
        make_pool(leased=(1,)).pack(0)


def test_R5_a_freed_row_holds_nothing_of_its_last_owner() -> None:
    pool = make_pool(leased=(0, 1))
    pool.scatter((0, 1), make_state(3, 4))
    pool.free(0)
    pool.lease(0)
    state = pool.gather((0, 1))
    assert torch.isnan(state["slots"][0]).all()
    assert state["position"].tolist() == [POISON_INT, 4]
    assert state["slots"][1].unique().tolist() == [4]


@given(st.lists(st.tuples(st.sampled_from(["lease", "free", "write"]), st.integers(0, 3), st.integers(0, 99))))
def test_random_traces_never_leak_or_share_a_row(trace: list[tuple[str, int, int]]) -> None:
    pool, model = make_pool(), dict[int, int | None]()
    for action, row, value in trace:
        allowed = (action == "lease") != (row in model)
        if not allowed:
            with pytest.raises(RuntimeError):
                pool.write(row, make_state(value)) if action == "write" else getattr(pool, action)(row)
        elif action == "write":
            pool.write(row, make_state(value))
            model[row] = value
        elif action == "lease":
            pool.lease(row)
            model[row] = None
        else:
            pool.free(row)
            del model[row]
        assert pool.num_leased == len(model)
    for row, expected in model.items():
        assert pool.gather((row,))["position"].item() == (POISON_INT if expected is None else expected)


def test_X17_pool_larger_than_memory_is_a_memory_error_with_its_size() -> None:
    with pytest.raises(MemoryError, match=r"no memory for the states of 1000000000000 slots, about \d+\.\d GiB"):
        StatePool(SPEC, 10**12)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="Linux says how much memory is resident")
def test_rows_that_are_not_used_take_no_memory_and_give_it_back() -> None:
    """Of 256 MiB; what else happens in this process meanwhile is far below half of that."""
    spec = StateSpec((TensorSpec("slots", (1 << 20,), torch.float32),))
    before = resident_bytes()
    pool = StatePool(spec, 64)
    assert resident_bytes() - before < pool.num_bytes // 2
    rows = range(64)
    for row in rows:
        pool.lease(row)
        pool.write(row, {"slots": torch.ones(1, 1 << 20)})
    assert resident_bytes() - before > pool.num_bytes // 2
    pool.give_back()
    assert pool.tensors["slots"][0, 0] == 1.0  # of leased rows nothing goes
    for row in rows:
        pool.free(row)
    pool.give_back()
    assert resident_bytes() - before < pool.num_bytes // 2
    pool.lease(5)
    assert not pool.gather((5,))["slots"].any()


@pytest.mark.parametrize("row_numbers", [1 << 16, 3 * 1536, (1 << 19) + 7, 1 << 20])
def test_the_first_row_ends_where_a_huge_page_begins(row_numbers: int) -> None:
    pages = Pages((400, row_numbers), torch.float32)
    assert pages.tensor.shape == (400, row_numbers)
    assert pages.tensor.is_contiguous()
    assert pages.tensor.data_ptr() % CACHE_LINE_BYTES == 0
    assert -pages.tensor[1].data_ptr() % HUGE_PAGE_BYTES < CACHE_LINE_BYTES
    pages.tensor[-1] = 1.0
    pages.give_back()
    assert not pages.tensor[-1].any()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text("utf-8").split()[1]) * mmap.PAGESIZE
