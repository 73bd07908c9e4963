"""What the users of one Locust process share: the profile, the scripts, the servers, the recorder, the end."""

from __future__ import annotations

import dataclasses
import itertools
import random
import time
import uuid
from collections.abc import Callable, Iterator

from gevent import sleep

from loadtests.client import Client
from loadtests.recording import Recorder
from loadtests.run_profile import Profile
from loadtests.samples import Sample
from loadtests.scripts import Kind, Script, Scripts

MAX_WAIT_S = 5.0  # for a Retry-After


@dataclasses.dataclass(slots=True)
class RunState:
    """`started_at`, `ends_at`: readings of `time.monotonic()`; after the second nobody begins anything."""

    profile: Profile
    scripts: Scripts
    urls: tuple[str, ...]
    recorder: Recorder
    started_at: float = 0.0
    ends_at: float = 0.0
    num_busy: int = 0  # users in the middle of something
    loop_is_done: Callable[[], bool] = lambda: True  # of the open loop
    rng: random.Random = dataclasses.field(default_factory=random.Random)
    _turns: Iterator[int] = dataclasses.field(default_factory=itertools.count)

    def start(self) -> None:
        self.started_at = time.monotonic()
        self.ends_at = self.started_at + self.profile.run_s

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self.ends_at

    @property
    def is_drained(self) -> bool:
        """Nothing begins any more, and nothing is under way."""
        return self.is_over and not self.num_busy and self.loop_is_done()

    def clients(self, *, receive_bytes: int | None = None) -> list[Client]:
        """One for each replica."""
        timeout_s = self.profile.timeout_s
        return [Client(url, timeout_s=timeout_s, receive_bytes=receive_bytes) for url in self.urls]

    def script(self, kind: Kind) -> Script:
        """Any of them."""
        return self.rng.choice(self.scripts.of(kind))

    def turn_of(self, clients: list[Client]) -> Client:
        """One after the other, over all users of the process."""
        return clients[next(self._turns) % len(clients)]

    def think(self) -> None:
        mean_s = self.profile.behaviour.think_s
        if mean_s:
            sleep(self.rng.expovariate(1 / mean_s))


def new_id(prefix: str) -> str:
    return f"{prefix}-{uuid.uuid4().hex}"


def wait_retry_after(sample: Sample) -> None:
    """After a refusal, as stock clients do."""
    sleep(min(MAX_WAIT_S, sample.retry_after_s or 0.2))
