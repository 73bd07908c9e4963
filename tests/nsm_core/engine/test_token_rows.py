from __future__ import annotations

import asyncio
import dataclasses
import itertools
import threading

import numpy as np
import pytest

from nsm_core.engine.async_engine import AsyncEngine
from nsm_core.engine.engine import Engine
from nsm_core.engine.request import Event, GenerationRequest, TokenEvent
from nsm_core.engine.sequence import RunningSequence
from nsm_core.engine.token_rows import NUM_HELD, NUMBER_BITS, Ints, TokenBatch, TokenRows
from nsm_core.engine.token_text import TokenText
from nsm_core.sampling.device import pack_rows
from nsm_core.sampling.result import SKIPPED
from nsm_core.tokenizer import Tokenizer
from tests.nsm_core.engine.harness import make_engine, make_request, overlapped, random_ids, run_all, small_model

VOCAB = 512


def row_of(rows: TokenRows, slot: int, tokenizer: Tokenizer, *, tag: int | None, **options: object) -> RunningSequence:
    """A running request that has its first token."""
    request = make_request(f"r{slot}", (1, 2), **options)  # type: ignore[arg-type]
    sequence = RunningSequence(request, tokenizer, 0.0, tag=tag)
    rows.open(slot, sequence)
    sequence.append(100)
    return sequence


def take(rows: TokenRows, slots: list[int], ids: list[int]) -> list[bool]:
    at = np.array(slots)
    rows.launched(at)
    (is_plain,) = rows.take_plain(at, rows.tags[at], np.array([ids]))
    rows.landed(at, is_plain.astype(np.int64))
    taken: list[bool] = is_plain.tolist()
    return taken


def test_plain_tokens_join_their_sequence_in_order(tiny_tokenizer: Tokenizer) -> None:
    rows = TokenRows(4, VOCAB)
    one = row_of(rows, 1, tiny_tokenizer, tag=7, max_tokens=200)
    two = row_of(rows, 3, tiny_tokenizer, tag=8, max_tokens=200)
    for token_id in range(NUM_HELD + 3):
        assert take(rows, [1, 3], [token_id, token_id + 1]) == [True, True]
    assert one.sampled == [100, *range(NUM_HELD + 3)]
    rows.close(3)
    assert two.sampled == [100, *range(1, NUM_HELD + 4)]
    assert one.num_in_flight == two.num_in_flight == 0


def test_tokens_that_need_more_than_an_id_are_not_plain(tiny_tokenizer: Tokenizer) -> None:
    rows = TokenRows(8, VOCAB)
    row_of(rows, 0, tiny_tokenizer, tag=1, stop_token_ids=(5,))
    row_of(rows, 1, tiny_tokenizer, tag=2)
    row_of(rows, 2, tiny_tokenizer, tag=None)
    row_of(rows, 3, tiny_tokenizer, tag=3, stop=("x",))
    row_of(rows, 4, tiny_tokenizer, tag=4, max_tokens=2)  # its last
    first = RunningSequence(make_request("first"), tiny_tokenizer, 0.0, tag=5)
    rows.open(5, first)
    assert take(rows, list(range(6)), [5] * 6) == [False, True, False, False, False, False]
    assert take(rows, [0, 1], [6, -1]) == [True, False]  # one is not finite


def test_a_slot_that_another_request_has_now_gets_no_token_of_the_one_before(tiny_tokenizer: Tokenizer) -> None:
    rows = TokenRows(1, VOCAB)
    row_of(rows, 0, tiny_tokenizer, tag=1)
    slots, tags = np.array([0]), rows.tags.copy()
    rows.close(0)
    assert rows.take_plain(slots, tags, np.array([[3]])).tolist() == [[False]]
    other = row_of(rows, 0, tiny_tokenizer, tag=2)
    assert rows.take_plain(slots, tags, np.array([[3]])).tolist() == [[False]]
    assert other.sampled == [100]


def test_parameters_are_those_of_the_sequences(tiny_tokenizer: Tokenizer) -> None:
    rows = TokenRows(3, VOCAB)
    sequences = [
        row_of(rows, slot, tiny_tokenizer, tag=slot, temperature=0.5 * slot, seed=slot, max_tokens=50)
        for slot in range(3)
    ]
    take(rows, [0, 2], [9, 9])
    rows.launched(np.array([1, 2]))
    assert rows.packed_params(np.arange(3)).tolist() == pack_rows(sequences).tolist()


def test_rounds_of_a_launch_are_taken_up_to_the_first_token_that_is_not_plain(tiny_tokenizer: Tokenizer) -> None:
    """In order: all plain, a stop id, the last token, one that is not finite, one that was left out from the start."""
    rows = TokenRows(5, VOCAB)
    sequences = [
        row_of(
            rows, slot, tiny_tokenizer, tag=slot, stop_token_ids=(5,) * (slot == 1), max_tokens=4 if slot == 2 else 9
        )
        for slot in range(5)
    ]
    slots = np.arange(5)
    assert rows.most_rounds(slots, 4) == 4
    assert rows.launched(slots, 4).tolist() == [2]
    ids = np.array(
        [[7, 7, 7, 7, SKIPPED], [8, 5, 8, -1, SKIPPED], [9, SKIPPED, 9, SKIPPED, SKIPPED], [3, *[SKIPPED] * 4]]
    )
    is_plain = rows.take_plain(slots, rows.tags[slots], ids)
    assert is_plain.sum(axis=0).tolist() == [4, 1, 2, 1, 0]
    rows.landed(slots, is_plain.sum(axis=0))
    assert [sequence.sampled for sequence in sequences] == [[100, 7, 8, 9, 3], [100, 7], [100, 7, 8], [100, 7], [100]]
    assert rows.num_in_flight.tolist() == [0, 3, 1, 3, 4]


def test_rounds_that_fill_what_is_held_join_the_list_in_order(tiny_tokenizer: Tokenizer) -> None:
    rows = TokenRows(1, VOCAB)
    sequence = row_of(rows, 0, tiny_tokenizer, tag=1, max_tokens=300)
    slots, want = np.array([0]), [100]
    for start in range(0, 3 * NUM_HELD, 7):
        ids = np.arange(start, start + 7)[:, None]
        assert rows.take_plain(slots, rows.tags[slots], ids).all()
        want += range(start, start + 7)
    assert sequence.sampled == want


def test_rounds_are_as_many_as_the_longest_request_needs_and_none_beside_one_without_a_tag(
    tiny_tokenizer: Tokenizer,
) -> None:
    rows = TokenRows(3, VOCAB)
    row_of(rows, 0, tiny_tokenizer, tag=0, max_tokens=2)
    row_of(rows, 1, tiny_tokenizer, tag=1, max_tokens=4)
    row_of(rows, 2, tiny_tokenizer, tag=None, max_tokens=9)
    assert rows.most_rounds(np.array([0, 1]), 8) == 3
    assert rows.most_rounds(np.array([0, 1]), 2) == 2
    assert rows.most_rounds(np.array([0, 1]), 0) == 0
    assert rows.most_rounds(np.array([0, 2]), 8) == 0


def test_those_that_reach_their_last_token_are_told_at_the_launch(tiny_tokenizer: Tokenizer) -> None:
    rows = TokenRows(2, VOCAB)
    row_of(rows, 0, tiny_tokenizer, tag=0, max_tokens=3)
    row_of(rows, 1, tiny_tokenizer, tag=1, max_tokens=9)
    assert rows.launched(np.array([0, 1])).tolist() == []
    assert rows.launched(np.array([0, 1])).tolist() == [0]


@pytest.mark.parametrize("num_rounds", [0, 4])
async def test_an_engine_of_this_process_gives_the_events_of_one_whose_steps_do_not_overlap(
    tiny_tokenizer: Tokenizer, num_rounds: int
) -> None:
    requests = [
        make_request(f"r{number}", random_ids(number, 5), max_tokens=30 + number, stop=("x",) * (number == 2))
        for number in range(4)
    ]
    executor = overlapped(num_rounds=num_rounds)
    engine = AsyncEngine(make_engine(small_model(), tiny_tokenizer, executor=executor, speculation="off"))
    await engine.start()

    async def read(request: GenerationRequest) -> list[Event]:
        return [event async for event in engine.submit(request).events()]

    found = await asyncio.gather(*map(read, requests))
    await engine.stop()
    want = run_all(make_engine(small_model(), tiny_tokenizer, speculation="off"), requests)
    for request, events in zip(requests, found, strict=True):
        assert events == want[request.request_id].events


def test_most_tokens_of_requests_with_tags_are_no_events(tiny_tokenizer: Tokenizer) -> None:
    engine = make_engine(small_model(), tiny_tokenizer, executor=overlapped(), speculation="off")
    request = make_request("a", random_ids(1, 5), max_tokens=20)
    engine.add(request, tag=3)
    text, plain, events = TokenText(tiny_tokenizer, request), list[int](), list[TokenEvent]()
    while engine.has_work:
        new = engine.step()
        plain += [token_id for batch in engine.take_tokens() for token_id in batch.ids.tolist()]
        events += [event for _, event in new if isinstance(event, TokenEvent)]
    assert (len(plain), len(events)) == (18, 2)
    assert all(not event.text for event in events)
    other = run_all(make_engine(small_model(), tiny_tokenizer), [request])["a"]
    assert [events[0].token_id, *plain, events[1].token_id] == other.ids
    assert "".join(text.texts(other.ids)) == "".join(token.text for token in other.tokens)


def waits_for_each(engine: Engine) -> None:
    """Steps of so few rows are waited for, as on a GPU."""
    assert engine._blockers._overlap is not None
    engine._blockers._overlap.min_rows = 100


def test_steps_that_are_waited_for_give_plain_tokens_too(tiny_tokenizer: Tokenizer) -> None:
    requests = [
        make_request("a", random_ids(1, 5), max_tokens=12),
        make_request("b", random_ids(2, 5), max_tokens=13, logprobs=1),
        make_request("c", random_ids(3, 5), max_tokens=14, stop=("x",)),
        make_request("d", random_ids(4, 5), max_tokens=15, temperature=1.0, seed=3),
        make_request("e", random_ids(5, 5), max_tokens=16, repetition_penalty=1.5),
        make_request("f", random_ids(6, 5), max_tokens=17, stop_token_ids=tuple(range(0, 512, 7))),
    ]
    want = run_all(make_engine(small_model(), tiny_tokenizer, speculation="off"), requests)
    engine = make_engine(small_model(), tiny_tokenizer, executor=overlapped(), speculation="off")
    waits_for_each(engine)
    found = run_all(engine, requests, reads_ids=tiny_tokenizer)
    for name, outcome in want.items():
        assert found[name].events == outcome.events


def test_plain_tokens_of_steps_that_are_waited_for_are_no_events(tiny_tokenizer: Tokenizer) -> None:
    engine = make_engine(small_model(), tiny_tokenizer, executor=overlapped(), speculation="off")
    waits_for_each(engine)
    engine.add(make_request("a", random_ids(1, 5), max_tokens=20), tag=3)
    num_plain = num_events = 0
    while engine.has_work:
        num_events += sum(isinstance(event, TokenEvent) for _, event in engine.step())
        num_plain += sum(len(batch.ids) for batch in engine.take_tokens())
    assert (num_plain, num_events) == (18, 2)


def test_forced_tokens_are_not_taken_from_steps_that_are_waited_for(tiny_tokenizer: Tokenizer) -> None:
    request = make_request("a", random_ids(1, 5), max_tokens=12)
    want = run_all(make_engine(small_model(), tiny_tokenizer, speculation="off"), [request])["a"]
    sampled = tuple(event.token_id for event in want.tokens[:4])
    engine = make_engine(small_model(), tiny_tokenizer, executor=overlapped(), speculation="off")
    waits_for_each(engine)
    engine.add(dataclasses.replace(request, sampled_ids=sampled), tag=1)
    ids: list[int] = []
    while engine.has_work:
        ids += [event.token_id for _, event in engine.step() if isinstance(event, TokenEvent)]
        assert not engine.take_tokens()
    assert [*sampled, *ids] == [event.token_id for event in want.tokens]


@pytest.mark.parametrize("num_rounds", [0, 4])
async def test_a_listener_that_takes_now_gets_each_token_once_and_in_order(
    tiny_tokenizer: Tokenizer, num_rounds: int
) -> None:
    """The first and the last token come by the loop, and every third step is refused."""
    executor = overlapped(num_rounds=num_rounds)
    engine = AsyncEngine(make_engine(small_model(), tiny_tokenizer, executor=executor, speculation="off"))
    seen: dict[int, list[int]] = {1: [], 2: []}
    threads: set[bool] = set()
    num_asked = itertools.count()

    def take(index: int, numbers: Ints, ids: Ints) -> None:
        assert index == 5
        threads.add(threading.current_thread() is threading.main_thread())
        for number, token_id in zip(numbers.tolist(), ids.tolist(), strict=True):
            seen[number].append(token_id)

    def take_now(index: int, numbers: Ints, ids: Ints) -> bool:
        if next(num_asked) % 3 == 2:
            return False
        take(index, numbers, ids)
        return True

    engine.listen_tokens(take, now=take_now)
    await engine.start()
    ends = []
    requests = [make_request(f"r{number}", random_ids(number, 5), max_tokens=60) for number in seen]
    for number, request in zip(seen, requests, strict=True):
        ended = asyncio.Event()

        def listen(event: Event, number: int = number, ended: asyncio.Event = ended) -> None:
            if isinstance(event, TokenEvent):
                seen[number].append(event.token_id)
            else:
                ended.set()

        engine.submit(request, tag=5 << NUMBER_BITS | number).listen(listen)
        ends.append(ended)
    async with asyncio.timeout(60):
        for ended in ends:
            await ended.wait()
    await engine.stop()
    want = run_all(make_engine(small_model(), tiny_tokenizer, speculation="off"), requests)
    assert list(seen.values()) == [[event.token_id for event in run.tokens] for run in want.values()]
    assert threads == {True, False}


@pytest.mark.parametrize("indices", [[3], [0, 0], [2, 2, 2], [5, 1, 5, 0, 1, 5], [7, 6, 5]])
def test_a_batch_is_split_by_listeners_in_its_order(indices: list[int]) -> None:
    numbers, ids = list(range(10, 10 + len(indices))), list(range(100, 100 + len(indices)))
    tags = [index << NUMBER_BITS | number for index, number in zip(indices, numbers, strict=True)]
    batch = TokenBatch(np.array(tags), np.array(ids))
    found = [(index, theirs.tolist(), own.tolist()) for index, theirs, own in batch.by_listener()]
    assert found == [
        (index, *(list(part) for part in zip(*rows, strict=True)))
        for index in sorted(set(indices))
        for rows in [[(n, i) for at, n, i in zip(indices, numbers, ids, strict=True) if at == index]]
    ]
