"""How often a turn's tokens are written: an append costs the same for a few as for many."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any, cast

from nsm_core.errors import NsmError
from service.turns.codec import StoredToken, decode_tokens
from service.turns.lease import HeldLease
from service.turns.token_writer import BATCH_S, FEW_TOKENS, SLOW_BATCH_S, TokenWriter
from tests.support.held_time import HeldTime, held_time

STEP_S = BATCH_S / 20


class Held:
    """A lease whose appends arrive at once."""

    def __init__(self, now: HeldTime) -> None:
        self._now = now
        self.appends: list[tuple[float, list[int]]] = []

    async def append_turn(self, turn_id: str, *, index: int, chunk: bytes) -> bool:
        assert (turn_id, index) == ("t", len(self.appends))
        self.appends.append((self._now(), [token.token_id for token in decode_tokens(chunk)]))
        return False

    async def is_cancel_wanted(self, turn_id: str) -> bool:
        return False


async def written(num_tokens: int, *, every_s: float) -> list[tuple[float, list[int]]]:
    """The appends of a turn that samples a token every so many seconds."""

    def fail(error: NsmError) -> Any:
        raise error

    with held_time() as now:
        held = Held(now)
        writer = TokenWriter(cast(HeldLease, held), "t", on_stop=fail)
        due = now()
        for token_id in range(num_tokens):
            writer.put([StoredToken(token_id)])
            due += every_s
            while now() < due:
                await now.advance(STEP_S)
        await writer.stop(is_complete=True)
    assert [token_id for _, ids in held.appends for token_id in ids] == list(range(num_tokens))
    return held.appends


def gaps(appends: list[tuple[float, list[int]]]) -> list[float]:
    times = [at for at, _ in appends]
    return [later - earlier for earlier, later in itertools.pairwise(times)]


async def test_a_fast_turn_is_written_ten_times_a_second() -> None:
    appends = await written(400, every_s=BATCH_S / FEW_TOKENS / 2)
    assert max(gaps(appends)) < 1.5 * BATCH_S + 2 * STEP_S
    assert min(len(ids) for _, ids in appends[1:-1]) > FEW_TOKENS


async def test_a_slow_turn_is_written_three_times_a_second() -> None:
    appends = await written(60, every_s=BATCH_S / 3)
    assert min(gaps(appends)[1:-1]) > SLOW_BATCH_S - 2 * STEP_S
    assert max(gaps(appends)) < 1.5 * SLOW_BATCH_S + 2 * STEP_S


async def test_one_token_is_written_within_a_batch() -> None:
    appends = await written(1, every_s=1.6 * BATCH_S)
    assert [ids for _, ids in appends] == [[0]]


async def test_a_turn_that_ends_before_its_first_batch_never_calls_the_store() -> None:
    with held_time() as now:
        held = Held(now)
        writer = TokenWriter(cast(HeldLease, held), "t", on_stop=lambda error: None)
        writer.put([StoredToken(0)])
        await writer.stop()
        num_tasks = len(asyncio.all_tasks())
        await now.advance(3.0)
    assert (held.appends, num_tasks) == ([], 1)


async def test_stop_waits_for_the_write_that_is_under_way() -> None:
    with held_time() as now:
        held = Held(now)
        may_arrive = asyncio.Event()
        append = held.append_turn

        async def append_late(turn_id: str, *, index: int, chunk: bytes) -> bool:
            await may_arrive.wait()
            return await append(turn_id, index=index, chunk=chunk)

        held.append_turn = append_late  # type: ignore[method-assign]
        writer = TokenWriter(cast(HeldLease, held), "t", on_stop=lambda error: None)
        writer.put([StoredToken(7)])
        await now.advance(2 * BATCH_S)
        stopping = asyncio.create_task(writer.stop())
        await now.advance(1.0)
        assert not stopping.done()
        may_arrive.set()
        await stopping
    assert [ids for _, ids in held.appends] == [[7]]
