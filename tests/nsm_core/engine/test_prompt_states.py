"""States kept on the way through a prompt: at the places asked for, those of one run over the ids before."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nsm_core.engine.request import PromptScored, PromptState, Resume
from nsm_core.engine.scheduler import Scheduler
from nsm_core.errors import InvalidRequest
from nsm_core.tokenizer import Tokenizer
from tests.nsm_core.engine.harness import (
    FINGERPRINT,
    TOLERANCE,
    Outcome,
    make_engine,
    make_request,
    random_ids,
    run_all,
    small_model,
)

pytestmark = pytest.mark.usefixtures("waiting_or_overlapped")

POSITIONS = (1, 64, 65, 100, 129)


def states_of(outcome: Outcome) -> dict[int, bytes]:
    return {event.position: event.state for event in outcome.events if isinstance(event, PromptState)}


def test_prompt_states_come_before_the_first_token_one_for_each_position(tiny_tokenizer: Tokenizer) -> None:
    ids, model = random_ids(1, 129), small_model()
    request = dataclasses.replace(make_request("a", ids, prompt_logprobs=0), keep_states_at=POSITIONS)
    others = [make_request(f"other{seed}", random_ids(seed, 90)) for seed in (2, 3)]
    engine = make_engine(model, tiny_tokenizer)
    outcome = run_all(engine, [request, *others])["a"]
    assert isinstance(outcome.events[0], PromptScored)
    assert [type(event) for event in outcome.events[1:6]] == [PromptState] * 5
    states = states_of(outcome)
    assert tuple(states) == POSITIONS
    for position in POSITIONS:
        _, want = model(torch.tensor([ids[:position]]), model.initial_state(1))
        got = model.state_spec.unpack(states[position])
        for name, tensor in want.items():
            torch.testing.assert_close(got[name], tensor, rtol=TOLERANCE, atol=TOLERANCE)


def test_R10_run_from_any_prompt_state_equals_the_unbroken_run(tiny_tokenizer: Tokenizer) -> None:
    ids = random_ids(1, 130)
    request = dataclasses.replace(make_request("a", ids, temperature=1.0), keep_states_at=POSITIONS)
    unbroken = run_all(make_engine(small_model(), tiny_tokenizer), [request])["a"]
    rests = [
        make_request(
            str(position),
            ids[position:],
            resume=Resume(state=state, position=position, fingerprint=FINGERPRINT, generated_counts={}),
            temperature=1.0,
        )
        for position, state in states_of(unbroken).items()
    ]
    resumed = run_all(make_engine(small_model(), tiny_tokenizer), rests)
    assert {tuple(outcome.ids) for outcome in resumed.values()} == {tuple(unbroken.ids)}


def test_prompt_state_positions_count_from_the_resumed_position(tiny_tokenizer: Tokenizer) -> None:
    ids = random_ids(1, 40)
    first = dataclasses.replace(make_request("a", ids[:20]), keep_states_at=(20,))
    state = states_of(run_all(make_engine(small_model(), tiny_tokenizer), [first])["a"])[20]
    resume = Resume(state=state, position=20, fingerprint=FINGERPRINT, generated_counts={})
    second = dataclasses.replace(make_request("b", ids[20:], resume=resume), keep_states_at=(5, 20))
    assert tuple(states_of(run_all(make_engine(small_model(), tiny_tokenizer), [second])["b"])) == (25, 40)


@pytest.mark.parametrize("positions", [(0,), (-1,), (5,), (2, 2), (3, 1)])
def test_prompt_state_positions_outside_the_prompt_or_unordered_are_refused(
    positions: tuple[int, ...], tiny_tokenizer: Tokenizer
) -> None:
    request = dataclasses.replace(make_request("a", (1, 2, 3, 4)), keep_states_at=positions)
    with pytest.raises(InvalidRequest, match=r"keep_states_at must be rising numbers in \[1, 4\]"):
        make_engine(small_model(), tiny_tokenizer).add(request)


@given(st.integers(1, 400), st.lists(st.integers(1, 400), unique=True, max_size=5).map(sorted), st.integers(2, 200))
def test_no_chunk_goes_across_a_border(prompt_len: int, positions: list[int], token_budget: int) -> None:
    boundaries = tuple(position for position in positions if position <= prompt_len)
    scheduler = Scheduler(max_slots=2, token_budget=token_budget, queue_limit=2)
    scheduler.add("other", prompt_len=150)
    scheduler.add("a", prompt_len=prompt_len, boundaries=boundaries)
    ends = []
    for _ in range(prompt_len + 150):
        plan = scheduler.plan()
        scheduler.apply(plan)
        ends += [chunk.start + chunk.length for chunk in plan.prefill if chunk.slot == 1]
    assert ends == sorted(set(ends))
    assert ends[-1] == prompt_len
    assert set(boundaries) <= set(ends)
