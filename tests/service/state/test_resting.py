"""Sessions that nobody uses lose snapshots, and are counted."""

from __future__ import annotations

from service.state.resting import shed_once
from tests.service.state.test_keeper import POLICY, exact, newest
from tests.support.turns import make_harness


async def test_sessions_that_lost_snapshots_are_counted() -> None:
    async with make_harness(exact(), policy=POLICY) as harness:
        await harness.say(*range(1, 40))
        keeper = harness.turns.keeper
        await keeper.drain()
        assert (await newest(harness)).snapshot_version == 1
        assert await shed_once(harness.store, keeper, cold_after_s=0.0, older_s=0.0) == 1
        assert (await newest(harness)).snapshot_version == 0
        shed = [harness.sample("nsm_sessions_shed_total", snapshots=which) for which in ("older", "all")]
        assert shed == [0.0, 1.0]
