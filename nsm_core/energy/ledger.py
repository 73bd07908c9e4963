"""Who is charged for the energy: every joule goes to a request, or to idleness."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Mapping

from nsm_core.energy.meter import EnergyMeter
from nsm_core.stats import EnergyUse

READ_EVERY_S = 0.1  # a reading costs up to a tenth of a millisecond


class EnergyLedger:
    """Charges what a meter shows to the requests that were at work meanwhile, by their share of the work.

    The work of a step is its time, divided among its requests by the tokens that each had in it. Readings are a tenth
    of a second apart, and one is made for each step in which a request ends; between two readings every second of work
    costs the same. So the charges add up to the meter's joules, but for those of idle times: from `rest` to the next
    `work`. Not thread-safe.
    """

    def __init__(self, meter: EnergyMeter) -> None:
        self._meter = meter
        self._seen = meter.read()
        self._charged = [0.0] * len(self._seen)
        self._work: defaultdict[str, float] = defaultdict(float)  # seconds since the last reading
        self._accounts: dict[str, list[float]] = {}
        self._last_reading = 0.0
        self._is_resting = True

    @property
    def total(self) -> tuple[EnergyUse, ...]:
        """As the meter showed at the last reading."""
        return self._seen

    @property
    def charged(self) -> tuple[EnergyUse, ...]:
        """Of that, what requests were charged."""
        return self._uses(self._charged)

    def begin(self) -> None:
        """Before a step: the energy since the last step is charged to no request if the engine was idle."""
        if self._is_resting:
            self._is_resting = False
            self._read()

    def work(self, tokens: Mapping[str, int], seconds: float, *, now: float) -> None:
        """A step of `seconds` was made, in which each request had so many tokens. `now`: of any clock, in seconds."""
        num_tokens = sum(tokens.values())
        for request_id, count in tokens.items():
            self._work[request_id] += seconds * count / num_tokens
        if now - self._last_reading >= READ_EVERY_S:
            self._last_reading = now
            self._read()

    def rest(self) -> None:
        """Nothing is to be done for now. To be called again now and then, for `total`."""
        self._is_resting = True
        self._read()

    def close_account(self, request_id: str) -> tuple[EnergyUse, ...]:
        """What a request has cost, which is over; nothing when it never was at work."""
        if self._work.get(request_id):
            self._read()
        account = self._accounts.pop(request_id, None)
        return () if account is None else self._uses(account)

    def _read(self) -> None:
        shown = self._meter.read()
        used = [now.joules - before.joules for now, before in zip(shown, self._seen, strict=True)]
        self._seen = shown
        seconds = sum(self._work.values())
        if not seconds:
            return
        for request_id, share in self._work.items():
            account = self._accounts.setdefault(request_id, [0.0] * len(used))
            for index, joules in enumerate(used):
                account[index] += joules * share / seconds
                self._charged[index] += joules * share / seconds
        self._work.clear()

    def _uses(self, joules: list[float]) -> tuple[EnergyUse, ...]:
        return tuple(dataclasses.replace(use, joules=value) for use, value in zip(self._seen, joules, strict=True))
