"""A fleet of servers that share turns, event by event: what `benchmarks.sizing` stands on.

A server is a processor that its running requests share alike: each reads its new tokens, then makes its own, at the
speed that was measured for so many requests at once; who finds no free slot waits in order. Turns go round the servers
in a circle, as a proxy without affinity sends them. A conversation's next turn comes a pause after the end of its last.
"""

from __future__ import annotations

import bisect
import dataclasses
import heapq
import itertools
import math
import random
from collections import deque
from collections.abc import Iterator, Sequence

from loadtests.arrivals import TraceRow

NOTHING_LEFT = 1e-9


@dataclasses.dataclass(frozen=True, slots=True)
class TurnSize:
    """`pause_s`: from the end of the turn before; a conversation's first has none."""

    new_tokens: int
    output_tokens: int
    pause_s: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """What one server does in a second of its own, all to itself."""

    slots: int
    read: float  # tokens/s
    decode: tuple[tuple[int, float], ...]  # (requests at once, tokens/s of them all), rising
    token_s: float  # of the gateway, for each token
    turn_s: float  # of the gateway, for each turn: its snapshot decoded and encoded

    def tokens_per_s(self, running: int) -> float:
        """Of each of `running` requests, the gateway's share included."""
        return 1.0 / (running * (1.0 / self._decode_rate(running) + self.token_s))

    def _decode_rate(self, running: int) -> float:
        """Between what was measured, in a straight line; beyond it, no faster."""
        counts = [count for count, _ in self.decode]
        above = bisect.bisect_left(counts, running)
        if above == len(counts) or counts[above] == running:
            return self.decode[min(above, len(counts) - 1)][1]
        (low, low_rate), (high, high_rate) = self.decode[above - 1], self.decode[above]
        return low_rate + (high_rate - low_rate) * (running - low) / (high - low)

    def alone_s(self, turn: TurnSize) -> float:
        """Seconds of a full server that a turn takes."""
        full = self.decode[-1][1]
        return self.turn_s + turn.new_tokens / self.read + turn.output_tokens * (1.0 / full + self.token_s)


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """Over the measured stretch; times in seconds, one for each turn; `running`: of the fleet, sampled every second."""

    turns: int
    waits_s: list[float]
    first_tokens_s: list[float]
    running: list[int]


class Request:
    __slots__ = ("arrived_s", "decode_left", "read_left_s", "rest")

    def __init__(self, turn: TurnSize, rest: Sequence[TurnSize], arrived_s: float, speed: Speed) -> None:
        self.read_left_s = speed.turn_s + turn.new_tokens / speed.read
        self.decode_left = float(turn.output_tokens)
        self.rest = rest
        self.arrived_s = arrived_s


class Server:
    """`settle` first, then change what runs."""

    def __init__(self, speed: Speed) -> None:
        self.running: list[Request] = []
        self.waiting: deque[Request] = deque()
        self.version = 0  # of its schedule: an event of an older one is void
        self._speed = speed
        self._at_s = 0.0

    def advance(self, now_s: float) -> tuple[list[Request], list[Request]]:
        """Brings the running requests to `now_s`. Returns those that made their first token, and those that ended."""
        elapsed_s, self._at_s = now_s - self._at_s, now_s
        if not self.running:
            return [], []
        share_s = elapsed_s / len(self.running)
        tokens = elapsed_s * self._speed.tokens_per_s(len(self.running))
        first, ended = [], []
        for request in self.running:
            if request.read_left_s > 0:
                request.read_left_s -= share_s
                if request.read_left_s <= NOTHING_LEFT:
                    request.read_left_s = 0.0
                    first.append(request)
            else:
                request.decode_left -= tokens
                if request.decode_left <= NOTHING_LEFT:
                    ended.append(request)
        if ended:
            self.running = [request for request in self.running if request.decode_left > NOTHING_LEFT]
        return first, ended

    def admit(self) -> list[Request]:
        """Those that got a slot."""
        admitted = []
        while self.waiting and len(self.running) < self._speed.slots:
            admitted.append(self.waiting.popleft())
            self.running.append(admitted[-1])
        return admitted

    def next_change_s(self) -> float | None:
        """When a request has read its tokens or made its last one, if nothing comes before; always after now."""
        if not self.running:
            return None
        running = len(self.running)
        token_s = 1.0 / self._speed.tokens_per_s(running)
        left_s = min(
            request.read_left_s * running if request.read_left_s > 0 else request.decode_left * token_s
            for request in self.running
        )
        # What rounding left may take less than the clock can tell: time would stand still
        return max(self._at_s + left_s, math.nextafter(self._at_s, math.inf))


def conversations_of(rows: Sequence[TraceRow]) -> list[list[TurnSize]]:
    """The trace's conversations; of a later turn only what it adds to the one before is new."""
    turns: dict[int, list[TurnSize]] = {}
    before: dict[int, TraceRow] = {}
    for row in rows:
        last = before.get(row.conversation)
        known = 0 if last is None else last.prompt_tokens + last.output_tokens
        pause_s = 0.0 if last is None else row.at_s - last.at_s
        turn = TurnSize(max(1, row.prompt_tokens - known), max(1, row.output_tokens), pause_s)
        turns.setdefault(row.conversation, []).append(turn)
        before[row.conversation] = row
    return list(turns.values())


def starts(rows: Sequence[TraceRow], rate: float, rng: random.Random) -> Iterator[float]:
    """When conversations begin: gaps of the trace, drawn with replacement, `rate` a second on average."""
    gaps = [after.at_s - before.at_s for before, after in itertools.pairwise(rows)]
    factor = len(gaps) / sum(gaps) / rate
    now_s = 0.0
    while True:
        now_s += rng.choice(gaps) * factor
        yield now_s


@dataclasses.dataclass(frozen=True, slots=True)
class Arrival:
    """The first of `turns` comes now, the others after it."""

    turns: Sequence[TurnSize]
    is_first: bool


class Fleet:
    """One run. `turn_rate`: turns/s on average; the same arguments give the same outcome."""

    def __init__(self, rows: Sequence[TraceRow], speed: Speed, *, servers: int, turn_rate: float, seed: int) -> None:
        self._rng = random.Random(seed)
        self._conversations = conversations_of(rows)
        mean_turns = sum(map(len, self._conversations)) / len(self._conversations)
        self._starts = starts(rows, turn_rate / mean_turns, self._rng)
        self._speed = speed
        self._servers = [Server(speed) for _ in range(servers)]
        self._circle = itertools.cycle(self._servers)
        self._events: list[tuple[float, int, object]] = []
        self._numbers = itertools.count()
        self._from_s = 0.0
        self._outcome = Outcome(0, [], [], [])
        self._turns = 0

    def run(self, *, warm_up_s: float, measured_s: float) -> Outcome:
        self._from_s = warm_up_s
        samples = (warm_up_s + number for number in range(max(1, int(measured_s))))
        for at_s in samples:
            self._push(at_s, None)
        self._begin_next()
        while self._events and self._events[0][0] <= warm_up_s + measured_s:
            now_s, _, event = heapq.heappop(self._events)
            self._happen(now_s, event)
        return dataclasses.replace(self._outcome, turns=self._turns)

    def _happen(self, now_s: float, event: object) -> None:
        if event is None:
            self._outcome.running.append(sum(len(server.running) for server in self._servers))
        elif isinstance(event, tuple):
            server, version = event
            if version == server.version:
                self._change(server, now_s)
        else:
            turns, is_first = event.turns, event.is_first
            if is_first:
                self._begin_next()
            server = next(self._circle)
            server.waiting.append(Request(turns[0], turns[1:], now_s, self._speed))
            self._turns += now_s >= self._from_s
            self._change(server, now_s)

    def _begin_next(self) -> None:
        self._push(next(self._starts), Arrival(self._rng.choice(self._conversations), is_first=True))

    def _change(self, server: Server, now_s: float) -> None:
        """Settles what has happened at a server, lets in who waits, and says when to look again."""
        first, ended = server.advance(now_s)
        admitted = server.admit()
        if now_s >= self._from_s:
            self._outcome.first_tokens_s.extend(now_s - request.arrived_s for request in first)
            self._outcome.waits_s.extend(now_s - request.arrived_s for request in admitted)
        for request in ended:
            if request.rest:
                self._push(now_s + request.rest[0].pause_s, Arrival(request.rest, is_first=False))
        server.version += 1
        change_s = server.next_change_s()
        if change_s is not None:
            self._push(change_s, (server, server.version))

    def _push(self, at_s: float, event: object) -> None:
        heapq.heappush(self._events, (at_s, next(self._numbers), event))
