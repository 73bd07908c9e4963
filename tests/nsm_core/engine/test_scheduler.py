"""The scheduler alone: no model, no clock."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nsm_core.engine.scheduler import (
    LEAST_SHARE_STEPS,
    PROMPT_TOKENS_A_ROW,
    Chunk,
    Plan,
    Scheduler,
    SlotAssignment,
)
from nsm_core.errors import Overloaded
from tests.support.counts import scaled


def make_scheduler(
    *, max_slots: int = 4, token_budget: int = 256, queue_limit: int = 100, prompt_unit: int = 1
) -> Scheduler:
    return Scheduler(max_slots=max_slots, token_budget=token_budget, queue_limit=queue_limit, prompt_unit=prompt_unit)


def advance(scheduler: Scheduler) -> Plan:
    plan = scheduler.plan()
    scheduler.apply(plan)
    return plan


def test_decode_goes_first_and_prefill_gets_the_rest() -> None:
    scheduler = make_scheduler(max_slots=2, token_budget=8)
    scheduler.add("a", prompt_len=3)
    advance(scheduler)  # "a" now decodes in slot 0
    scheduler.add("b", prompt_len=100)
    plan = scheduler.plan()
    assert plan.decode == (0,)
    assert plan.prefill == (Chunk(slot=1, start=0, length=7),)
    assert plan.num_tokens == 8


def test_plan_without_work_is_empty() -> None:
    assert make_scheduler().plan().is_empty


def test_plan_leaves_the_scheduler_unchanged() -> None:
    scheduler = make_scheduler()
    scheduler.add("a", prompt_len=300)
    assert scheduler.plan() == scheduler.plan()
    assert (scheduler.num_waiting, scheduler.num_running) == (1, 0)


def test_a_prompt_is_read_in_chunks_and_then_decodes() -> None:
    scheduler = make_scheduler(token_budget=100)
    scheduler.add("a", prompt_len=250)
    chunks = [chunk for _ in range(3) for chunk in advance(scheduler).prefill]
    assert chunks == [Chunk(0, 0, 100), Chunk(0, 100, 100), Chunk(0, 200, 50)]
    assert advance(scheduler) == Plan(decode=(0,))


def test_requests_wait_in_order_of_arrival_and_take_the_lowest_slot() -> None:
    scheduler = make_scheduler(max_slots=2)
    for name in "abcd":
        scheduler.add(name, prompt_len=1)
    assert advance(scheduler).admitted == (SlotAssignment(0, "a"), SlotAssignment(1, "b"))
    assert advance(scheduler).admitted == ()
    scheduler.remove("b")
    scheduler.remove("a")
    assert advance(scheduler).admitted == (SlotAssignment(0, "c"), SlotAssignment(1, "d"))


def test_a_huge_prompt_does_not_starve_a_short_one_that_comes_later() -> None:
    scheduler = make_scheduler(token_budget=256)
    scheduler.add("huge", prompt_len=1_000_000)
    advance(scheduler)
    scheduler.add("short", prompt_len=5)
    assert advance(scheduler).prefill == (Chunk(0, 256, 251), Chunk(1, 0, 5))
    assert advance(scheduler).decode == (1,)


def test_many_short_prompts_share_one_step() -> None:
    scheduler = make_scheduler(max_slots=16, token_budget=100)
    for index in range(16):
        scheduler.add(str(index), prompt_len=5)
    assert [chunk.length for chunk in advance(scheduler).prefill] == [5] * 16


def test_the_queue_is_bounded_beyond_the_free_slots() -> None:
    scheduler = make_scheduler(max_slots=2, queue_limit=1)
    for name in "abc":
        scheduler.add(name, prompt_len=1)
    with pytest.raises(Overloaded, match="limit is 1"):
        scheduler.add("d", prompt_len=1)
    advance(scheduler)
    assert (scheduler.num_waiting, scheduler.num_running) == (1, 2)
    with pytest.raises(Overloaded):
        scheduler.add("d", prompt_len=1)
    scheduler.remove("c")
    scheduler.add("d", prompt_len=1)


def test_a_removed_request_is_not_planned_again() -> None:
    scheduler = make_scheduler()
    for name in ("waiting", "reading", "decoding"):
        scheduler.add(name, prompt_len=1 if name == "decoding" else 10_000)
    scheduler.remove("waiting")
    advance(scheduler)
    scheduler.remove("reading")
    scheduler.remove("decoding")
    assert scheduler.plan().is_empty
    assert (scheduler.num_waiting, scheduler.num_running) == (0, 0)


class Shadow:
    """A second book beside the scheduler's: it sees plans only, and checks each against all the rules."""

    def __init__(self, max_slots: int, token_budget: int) -> None:
        self.max_slots, self.token_budget = max_slots, token_budget
        self.waiting: dict[str, int] = {}
        self.running: dict[int, str] = {}
        self.unread: dict[int, int] = {}
        self.read: dict[int, int] = {}

    def check(self, plan: Plan) -> None:
        assert len(plan.admitted) == min(len(self.waiting), self.max_slots - len(self.running))
        assert [assignment.request_id for assignment in plan.admitted] == list(self.waiting)[: len(plan.admitted)]
        for assignment in plan.admitted:
            assert assignment.slot not in self.running
            self.running[assignment.slot] = assignment.request_id
            self.unread[assignment.slot] = self.waiting.pop(assignment.request_id)
            self.read[assignment.slot] = 0
        assert len(set(self.running)) == len(self.running) <= self.max_slots
        assert plan.decode == tuple(sorted(slot for slot in self.running if not self.unread[slot]))
        assert plan.num_tokens <= self.token_budget
        self.check_prefill(plan)

    def check_prefill(self, plan: Plan) -> None:
        slots = [chunk.slot for chunk in plan.prefill]
        assert len(set(slots)) == len(slots)
        unread_before = sum(self.unread.values())
        for chunk in plan.prefill:
            assert chunk.start == self.read[chunk.slot]
            assert 0 < chunk.length <= self.unread[chunk.slot]
            self.read[chunk.slot] += chunk.length
            self.unread[chunk.slot] -= chunk.length
        num_read = plan.num_tokens - len(plan.decode)
        assert num_read == min(unread_before, self.token_budget - len(plan.decode))  # no budget is left unused

    def forget(self, request_id: str) -> None:
        if self.waiting.pop(request_id, None) is None:
            slot = next(slot for slot, name in self.running.items() if name == request_id)
            for book in (self.running, self.unread, self.read):
                del book[slot]

    @property
    def names(self) -> list[str]:
        return [*self.waiting, *self.running.values()]


ACTIONS = st.one_of(
    st.integers(1, 600).map(lambda prompt_len: ("add", prompt_len)),
    st.integers(0, 99).map(lambda index: ("remove", index)),
    st.just(("step", 0)),
)


@settings(max_examples=scaled(200, 5000))
@given(st.integers(1, 6), st.integers(0, 300), st.lists(ACTIONS, max_size=60))
def test_random_traces_keep_every_rule(max_slots: int, spare: int, trace: list[tuple[str, int]]) -> None:
    scheduler = make_scheduler(max_slots=max_slots, token_budget=max_slots + spare)
    shadow = Shadow(max_slots, max_slots + spare)
    for number, (action, value) in enumerate(trace):
        if action == "add":
            scheduler.add(str(number), prompt_len=value)
            shadow.waiting[str(number)] = value
        elif action == "remove" and shadow.names:
            name = shadow.names[value % len(shadow.names)]
            scheduler.remove(name)
            shadow.forget(name)
        elif action == "step":
            shadow.check(advance(scheduler))
        assert (scheduler.num_waiting, scheduler.num_running) == (len(shadow.waiting), len(shadow.running))
    for name in shadow.names:
        scheduler.remove(name)
    assert scheduler.plan().is_empty


@given(
    token_budget=st.integers(6, 400),
    prompts=st.lists(st.tuples(st.integers(1, 900), st.integers(0, 5)), min_size=1, max_size=8),
    border=st.integers(1, 900),
)
@settings(max_examples=scaled(80, 500), deadline=None)
def test_where_the_cut_matters_it_depends_on_the_prompt_alone(
    token_budget: int, prompts: list[tuple[int, int]], border: int
) -> None:
    unit, scheduler = 64, make_scheduler(max_slots=6, token_budget=token_budget, prompt_unit=64)
    lengths = {str(index): length for index, (length, _) in enumerate(prompts)}
    unread, slots, steps = dict(lengths), dict[int, str](), 0
    while unread:
        for index, (length, arrival) in enumerate(prompts):
            if arrival == steps:
                scheduler.add(str(index), prompt_len=length, boundaries=(border,) if border < length else ())
        plan = advance(scheduler)
        slots |= {assignment.slot: assignment.request_id for assignment in plan.admitted}
        assert plan.num_tokens <= max(token_budget, len(plan.decode) + unit)
        assert plan.prefill or not scheduler.num_running or len(plan.decode) == scheduler.num_running
        for chunk in plan.prefill:
            name = slots[chunk.slot]
            begin = border if chunk.start >= border else 0
            assert (chunk.start - begin) % unit == 0
            unread[name] -= chunk.length
            if not unread[name]:
                del unread[name]
                scheduler.remove(name)
        steps += 1
        assert steps < 2000


def test_while_others_decode_a_step_reads_no_more_of_prompts_than_it_may() -> None:
    scheduler = Scheduler(max_slots=3, token_budget=100, queue_limit=4, prompt_tokens_beside=8)
    scheduler.add("a", prompt_len=60)
    alone = scheduler.plan()
    assert [chunk.length for chunk in alone.prefill] == [60]
    scheduler.apply(alone)
    scheduler.add("b", prompt_len=20)
    lengths = []
    while len((plan := scheduler.plan()).decode) < 2:
        lengths += [chunk.length for chunk in plan.prefill]
        scheduler.apply(plan)
    assert lengths == [8, 8, 4]


def test_while_others_decode_a_step_reads_one_batch_of_prompts() -> None:
    """Of a long and a short one the long one, unless the other was there first in a step of the oldest."""
    scheduler = Scheduler(max_slots=9, token_budget=4096, queue_limit=9, prompt_unit=64, prompt_tokens_beside=1024)
    decoding(scheduler, "a", is_background=False)
    assert scheduler._num_reading_steps == 1
    for name, prompt_len in (("short", 45), ("long", 900), ("longer", 950), ("longest", 1000)):
        scheduler.add(name, prompt_len=prompt_len)
    steps = []
    while plan := scheduler.plan().prefill:
        steps.append([(chunk.slot, chunk.length) for chunk in plan])
        advance(scheduler)
    assert steps == [[(2, 900)], [(3, 950)], [(1, 45)], [(4, 1000)]]


def test_prompts_that_one_call_reads_whatever_their_lengths_are_read_together() -> None:
    scheduler = Scheduler(max_slots=9, token_budget=4096, queue_limit=9, prompt_tokens_beside=1024, reads_ragged=True)
    decoding(scheduler, "a", is_background=False)
    for name, prompt_len in (("short", 45), ("long", 900)):
        scheduler.add(name, prompt_len=prompt_len)
    assert [chunk.length for chunk in scheduler.plan().prefill] == [45, 900]


def test_the_more_rows_decode_the_more_of_prompts_a_step_reads() -> None:
    scheduler = Scheduler(max_slots=5, token_budget=400, queue_limit=4, prompt_tokens_beside=12)
    decoding(scheduler, "a", is_background=False)
    scheduler.add("long", prompt_len=1000)
    assert [chunk.length for chunk in scheduler.plan().prefill] == [12]
    scheduler.remove("long")
    decoding(scheduler, "b", "c", is_background=False)
    scheduler.add("long", prompt_len=1000)
    assert [chunk.length for chunk in scheduler.plan().prefill] == [3 * PROMPT_TOKENS_A_ROW]


def decoding(scheduler: Scheduler, *request_ids: str, is_background: bool) -> None:
    """Adds requests and reads their prompts."""
    for request_id in request_ids:
        scheduler.add(request_id, prompt_len=1, is_background=is_background)
    while scheduler.plan().prefill:
        advance(scheduler)


def test_background_requests_alone_run_as_others_do() -> None:
    scheduler = make_scheduler(max_slots=8)
    decoding(scheduler, "a", "b", is_background=True)
    for _ in range(2 * LEAST_SHARE_STEPS):
        assert advance(scheduler).decode == (0, 1)


def test_background_requests_take_half_of_the_slots_and_come_after_the_others() -> None:
    scheduler = make_scheduler(max_slots=4)
    for number in range(3):
        scheduler.add(f"behind{number}", prompt_len=1, is_background=True)
    scheduler.add("live", prompt_len=1)
    admitted = [assignment.request_id for assignment in scheduler.plan().admitted]
    assert admitted == ["live", "behind0", "behind1"]
    advance(scheduler)
    assert scheduler.plan().admitted == ()
    scheduler.remove("behind0")
    assert [assignment.request_id for assignment in scheduler.plan().admitted] == ["behind2"]


def test_background_requests_stand_back_while_another_reads_its_prompt_but_for_their_least_share() -> None:
    scheduler = make_scheduler(max_slots=8, token_budget=8)
    decoding(scheduler, "a", "b", is_background=True)
    scheduler.add("c", prompt_len=100, is_background=True)
    scheduler.add("live", prompt_len=1000)
    steps = [advance(scheduler) for _ in range(3 * LEAST_SHARE_STEPS)]
    shared = [plan for plan in steps if plan.decode]
    assert len(shared) == 3
    assert all(plan.decode == (0, 1) for plan in shared)
    live = next(assignment.slot for assignment in steps[0].admitted if assignment.request_id == "live")
    alone = [plan for plan in steps if not plan.decode]
    assert all([chunk.slot for chunk in plan.prefill] == [live] for plan in alone)


def test_beside_requests_that_decode_as_many_of_the_background_decode_in_turns() -> None:
    scheduler = make_scheduler(max_slots=8)
    decoding(scheduler, "a", "b", "c", is_background=True)
    decoding(scheduler, "live", is_background=False)
    seen: dict[int, int] = {}
    for _ in range(3 * LEAST_SHARE_STEPS):
        plan = advance(scheduler)
        assert 3 in plan.decode
        assert len(plan.decode) in (2, 4)
        for slot in plan.decode:
            seen[slot] = seen.get(slot, 0) + 1
    assert seen[3] == 3 * LEAST_SHARE_STEPS
    assert min(seen[slot] for slot in (0, 1, 2)) > LEAST_SHARE_STEPS // 2


@settings(max_examples=scaled(25, 500), deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.booleans(), st.integers(1, 6)), min_size=1, max_size=12),
    st.sampled_from((1, 4)),
)
def test_every_request_gets_on_whoever_is_in_the_background(requests: list[tuple[int, bool, int]], unit: int) -> None:
    scheduler = make_scheduler(max_slots=3, token_budget=8, prompt_unit=unit)
    left = {}
    for number, (length, is_background, num_tokens) in enumerate(requests):
        scheduler.add(f"r{number}", prompt_len=length, is_background=is_background)
        left[f"r{number}"] = num_tokens
    names: dict[int, str] = {}
    for _ in range(2000):
        plan = scheduler.plan()
        if plan.is_empty:
            break
        names |= {assignment.slot: assignment.request_id for assignment in plan.admitted}
        scheduler.apply(plan)
        for slot in plan.decode:
            left[names[slot]] -= 1
            if not left[names[slot]]:
                scheduler.remove(names[slot])
    assert set(left.values()) == {0}


def test_plans_of_decoding_alone_are_made_once_and_anew_after_every_change() -> None:
    scheduler = Scheduler(max_slots=4, token_budget=8, queue_limit=4)
    for name in "ab":
        scheduler.add(name, prompt_len=2)
    scheduler.apply(scheduler.plan())
    first = scheduler.plan()
    assert first == Plan(decode=(0, 1))
    scheduler.apply(first)
    assert scheduler.plan() is first
    scheduler.add("c", prompt_len=1)
    scheduler.apply(scheduler.plan())
    assert scheduler.plan() == Plan(decode=(0, 1, 2))
    scheduler.remove("b")
    assert scheduler.plan() == Plan(decode=(0, 2))
