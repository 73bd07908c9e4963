"""A fleet of servers that share turns, event by event: what `benchmarks.sizing` stands on.

A server is a processor that its running requests share alike: each reads its new tokens, then makes its own, at the
speed that was measured for so many requests at once; who finds no free slot waits in order. All turns of a conversation
go to one server, as a proxy that hashes the session's id sends them; its next turn comes a pause after the end of its
last. Between turns its state is in the memory of the server, and becomes a snapshot by the server's policy.
"""

from __future__ import annotations

import bisect
import dataclasses
import heapq
import itertools
import math
import random
from collections import OrderedDict, deque
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
    load_s: float  # of the gateway, for a snapshot that is read from the store
    store_s: float  # and for one that is written

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
        """Seconds of a full server that a turn takes whose state is there."""
        full = self.decode[-1][1]
        return turn.new_tokens / self.read + turn.output_tokens * (1.0 / full + self.token_s)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """When states are stored (service/state/keeper.py), in tokens since the last snapshot: `limit` for a session that
    has been idle for `idle_s` or whose state leaves the memory, `long` and `busy` at once. `in_memory`: states that a
    server has room for. `limit` 0: each turn stores and loads its state.
    """

    limit: int
    long: int
    busy: int
    idle_s: float
    in_memory: int


NO_STATES = Policy(limit=2**62, long=2**62, busy=2**62, idle_s=0.0, in_memory=2**62)


@dataclasses.dataclass(slots=True)
class Moved:
    """What went to and from the store over the measured stretch: snapshots, and tokens that were read again."""

    loaded: int = 0
    stored: int = 0
    replayed: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """Over the measured stretch; times in seconds, one for each turn; `running`: of the fleet, sampled every second."""

    turns: int
    waits_s: list[float]
    first_tokens_s: list[float]
    running: list[int]
    moved: Moved


@dataclasses.dataclass(slots=True, eq=False)
class Session:
    """A conversation at its server. `unsaved`: tokens since its newest snapshot, `rest`: its turns to come."""

    rest: Sequence[TurnSize]
    server: Server
    unsaved: float
    ended_s: float = 0.0


class Request:
    __slots__ = ("arrived_s", "decode_left", "read_left_s", "session", "turn")

    def __init__(self, turn: TurnSize, session: Session, arrived_s: float, read_s: float) -> None:
        self.read_left_s = read_s
        self.decode_left = float(turn.output_tokens)
        self.turn = turn
        self.session = session
        self.arrived_s = arrived_s


class States:
    """The states in a server's memory, the least recently used first, and what they cost."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._held: OrderedDict[Session, None] = OrderedDict()

    def take(self, session: Session, now_s: float, moved: Moved) -> float:
        """Tokens that the session's next turn reads again; what happened since its last is settled."""
        policy = self._policy
        if policy.limit and session in self._held:
            if now_s - session.ended_s > policy.idle_s and session.unsaved > policy.limit:
                self._store(session, moved)
            return 0.0
        moved.loaded += 1
        moved.replayed += session.unsaved
        return session.unsaved

    def put(self, session: Session, turn: TurnSize, now_s: float, moved: Moved) -> None:
        """After a turn. A session that does not come back is idle for long enough."""
        policy, num_tokens = self._policy, turn.new_tokens + turn.output_tokens
        is_moving = session not in self._held and session.unsaved > 0
        session.unsaved += num_tokens
        session.ended_s = now_s
        is_long = num_tokens > policy.long or session.unsaved > policy.busy
        is_last = not session.rest and session.unsaved > policy.limit
        if is_long or is_last or (is_moving and session.unsaved > policy.limit) or not policy.limit:
            self._store(session, moved)
        self._held[session] = None
        self._held.move_to_end(session)
        while len(self._held) > policy.in_memory:
            oldest, _ = self._held.popitem(last=False)
            if oldest.unsaved > policy.limit:
                self._store(oldest, moved)

    def _store(self, session: Session, moved: Moved) -> None:
        session.unsaved = 0.0
        moved.stored += 1


class Server:
    """`settle` first, then change what runs."""

    def __init__(self, speed: Speed, policy: Policy) -> None:
        self.states = States(policy)
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
    """The first of the session's turns comes now, the others after it."""

    session: Session
    is_first: bool


class Fleet:
    """One run. `turn_rate`: turns/s on average; the same arguments give the same outcome. A conversation goes on in a
    session that rested: any number of tokens up to the limit of `policy` is not in its snapshot.
    """

    def __init__(
        self,
        rows: Sequence[TraceRow],
        speed: Speed,
        *,
        servers: int,
        turn_rate: float,
        seed: int,
        policy: Policy | None = None,
    ) -> None:
        self._rng = random.Random(seed)
        self._conversations = conversations_of(rows)
        mean_turns = sum(map(len, self._conversations)) / len(self._conversations)
        self._starts = starts(rows, turn_rate / mean_turns, self._rng)
        self._speed = speed
        self._max_unsaved = 0 if policy is None else policy.limit
        self._servers = [Server(speed, policy or NO_STATES) for _ in range(servers)]
        self._events: list[tuple[float, int, object]] = []
        self._numbers = itertools.count()
        self._from_s = 0.0
        self._outcome = Outcome(0, [], [], [], Moved())
        self._before = Moved()  # of the stretch that is not measured
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
            session = event.session
            if event.is_first:
                self._begin_next()
            turn, session.rest, server = session.rest[0], session.rest[1:], session.server
            num_loaded, moved = self._moved(now_s).loaded, self._moved(now_s)
            replayed = server.states.take(session, now_s, moved)
            load_s = self._speed.load_s * (moved.loaded - num_loaded)
            read_s = load_s + (turn.new_tokens + replayed) / self._speed.read
            server.waiting.append(Request(turn, session, now_s, read_s))
            self._turns += now_s >= self._from_s
            self._change(server, now_s)

    def _moved(self, now_s: float) -> Moved:
        return self._outcome.moved if now_s >= self._from_s else self._before

    def _begin_next(self) -> None:
        unsaved = self._rng.uniform(0.0, self._max_unsaved)
        session = Session(self._rng.choice(self._conversations), self._rng.choice(self._servers), unsaved)
        self._push(next(self._starts), Arrival(session, is_first=True))

    def _change(self, server: Server, now_s: float) -> None:
        """Settles what has happened at a server, lets in who waits, and says when to look again."""
        first, ended = server.advance(now_s)
        admitted = server.admit()
        if now_s >= self._from_s:
            self._outcome.first_tokens_s.extend(now_s - request.arrived_s for request in first)
            self._outcome.waits_s.extend(now_s - request.arrived_s for request in admitted)
        for request in ended:
            session = request.session
            server.states.put(session, request.turn, now_s, self._moved(now_s))
            if session.rest:
                self._push(now_s + session.rest[0].pause_s, Arrival(session, is_first=False))
        server.version += 1
        change_s = server.next_change_s()
        if change_s is not None:
            self._push(change_s, (server, server.version))

    def _push(self, at_s: float, event: object) -> None:
        heapq.heappush(self._events, (at_s, next(self._numbers), event))
