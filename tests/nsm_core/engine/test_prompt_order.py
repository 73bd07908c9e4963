"""The order of prompts: least unread tokens first, no prompt starves, owners share."""

from __future__ import annotations

import statistics

from hypothesis import given, settings
from hypothesis import strategies as st

from nsm_core.engine.prompt_order import AGEING_STEPS, PORTION
from nsm_core.engine.scheduler import Chunk, Plan, Scheduler
from tests.support.counts import scaled


def make_scheduler(*, max_slots: int, token_budget: int) -> Scheduler:
    return Scheduler(max_slots=max_slots, token_budget=token_budget, queue_limit=1000)


def advance(scheduler: Scheduler) -> Plan:
    plan = scheduler.plan()
    scheduler.apply(plan)
    return plan


def test_of_equal_prompts_one_is_read_to_its_end_before_the_next() -> None:
    scheduler = make_scheduler(max_slots=3, token_budget=100)
    for name in "abc":
        scheduler.add(name, prompt_len=150)
    assert advance(scheduler).prefill == (Chunk(0, 0, 100),)
    assert advance(scheduler).prefill == (Chunk(0, 100, 50), Chunk(1, 0, 50))
    assert advance(scheduler) == Plan(decode=(0,), prefill=(Chunk(1, 50, 99),))


def test_half_of_a_crowd_has_its_first_token_in_half_of_the_time() -> None:
    num_prompts, scheduler = 32, make_scheduler(max_slots=32, token_budget=256)
    for number in range(num_prompts):
        scheduler.add(str(number), prompt_len=280)
    ready_after, steps = list[int](), 0
    while len(ready_after) < num_prompts:
        steps += 1
        plan = advance(scheduler)
        ready_after += [steps] * sum(chunk.start + chunk.length == 280 for chunk in plan.prefill)
    assert statistics.median(ready_after) <= 0.55 * ready_after[-1]


def test_a_shorter_prompt_passes_a_longer_one_that_came_before() -> None:
    scheduler = make_scheduler(max_slots=2, token_budget=64)
    scheduler.add("long", prompt_len=1000)
    advance(scheduler)
    scheduler.add("short", prompt_len=100)
    assert [chunk.slot for chunk in advance(scheduler).prefill] == [1]


def test_a_long_prompt_goes_on_while_short_ones_keep_coming() -> None:
    scheduler = make_scheduler(max_slots=4, token_budget=64)
    scheduler.add("long", prompt_len=640)
    advance(scheduler)
    read, names = 64, dict[int, str]()
    for number in range(9 * AGEING_STEPS):
        scheduler.add(str(number), prompt_len=64)
        plan = advance(scheduler)
        names |= {assignment.slot: assignment.request_id for assignment in plan.admitted}
        read += sum(chunk.length for chunk in plan.prefill if chunk.slot == 0)
        for slot in plan.decode:
            scheduler.remove(names.pop(slot))
    assert read >= 640 - 64


def test_the_crowd_of_one_owner_does_not_hold_up_another_owner() -> None:
    scheduler = make_scheduler(max_slots=32, token_budget=256)
    for number in range(31):
        scheduler.add(str(number), prompt_len=280, owner="crowd")
    for _ in range(5):
        advance(scheduler)
    scheduler.add("alone", prompt_len=280, owner="other")
    steps = 0
    while 31 not in scheduler.plan().decode:
        advance(scheduler)
        steps += 1
    assert steps <= 4  # of 256 tokens each: as long as two prompts take, one of each owner


def test_an_owner_who_comes_back_has_saved_nothing_up() -> None:
    scheduler = make_scheduler(max_slots=4, token_budget=128)
    scheduler.add("steady", prompt_len=100_000, owner="steady")
    for _ in range(20):
        advance(scheduler)
    scheduler.add("late", prompt_len=100_000, owner="late")
    lengths = [{chunk.slot: chunk.length for chunk in advance(scheduler).prefill} for _ in range(8)]
    read = [sum(step.get(slot, 0) for step in lengths) for slot in (0, 1)]
    assert abs(read[0] - read[1]) <= 128 + PORTION


PROMPTS = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 500), st.sampled_from("xyz")), min_size=1, max_size=40)


@settings(max_examples=scaled(100, 3000))
@given(st.integers(1, 6), st.integers(1, 200), PROMPTS)
def test_no_prompt_waits_longer_than_older_ones_take_at_a_quarter_of_the_speed(
    max_slots: int, room: int, arrivals: list[tuple[int, int, str]]
) -> None:
    """A request decodes once and ends, so that new ones come all the time."""
    scheduler = make_scheduler(max_slots=max_slots, token_budget=max_slots + room)
    waiting, running = [*arrivals], dict[int, str]()
    unread, latest_end, steps, number = dict[int, int](), dict[int, int](), 0, 0
    pause = 0
    while waiting or running or scheduler.num_waiting:
        while waiting and pause == 0:
            pause, length, owner = waiting.pop(0)
            scheduler.add(f"{number} {length}", prompt_len=length, owner=owner)
            number += 1
        pause = max(0, pause - 1)
        plan = advance(scheduler)
        steps += 1
        for assignment in plan.admitted:
            running[assignment.slot] = assignment.request_id
            unread[assignment.slot] = int(assignment.request_id.split()[1])
            # what was admitted before, and this one: each in steps of at least `room` tokens, one in AGEING_STEPS
            turns = sum(-(-left // room) for left in unread.values())
            latest_end[assignment.slot] = steps - 1 + AGEING_STEPS * turns
        for chunk in plan.prefill:
            unread[chunk.slot] -= chunk.length
            if not unread[chunk.slot]:
                del unread[chunk.slot]
                assert steps <= latest_end.pop(chunk.slot)
        for slot in plan.decode:
            scheduler.remove(running.pop(slot))
    assert not unread


@settings(max_examples=scaled(60, 1000))
@given(st.integers(1, 300), st.lists(st.integers(1, 4), min_size=2, max_size=4))
def test_owners_with_enough_to_read_get_equal_shares_at_any_time(room: int, crowds: list[int]) -> None:
    max_slots = sum(crowds)
    scheduler = make_scheduler(max_slots=max_slots, token_budget=room)
    owner_of = [owner for owner, size in enumerate(crowds) for _ in range(size)]
    for slot, owner in enumerate(owner_of):
        scheduler.add(str(slot), prompt_len=1_000_000, owner=str(owner))
    read = [0] * len(crowds)
    for _ in range(40):
        for chunk in advance(scheduler).prefill:
            read[owner_of[chunk.slot]] += chunk.length
        assert max(read) - min(read) <= room + PORTION
