"""Whose time it is: a part's own, without that of the parts inside it."""

from __future__ import annotations

import itertools

from nsm_lab.bench.components import Stopwatch


def test_a_stopwatch_charges_the_innermost_part() -> None:
    ticks = itertools.count()
    watch = Stopwatch(clock=lambda: float(next(ticks)))
    with watch("model"):  # 0
        with watch("mixer"), watch("router"):  # 1, 2
            pass  # 3, 4
        with watch("router"):  # 5
            pass  # 6
    # 7
    assert watch.seconds == {"model": 3.0, "mixer": 2.0, "router": 2.0}
    with watch("head"):  # 8: what lies between belongs to nobody
        pass  # 9
    assert watch.seconds["head"] == 1.0
