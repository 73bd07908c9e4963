"""The seam between the gateway and whatever runs the model."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Sequence
from typing import Protocol, cast, runtime_checkable

from nsm_core.engine.event_queue import TakeTokens
from nsm_core.engine.request import Event, GenerationRequest, NamedState
from nsm_core.grammars.grammar import Grammar
from nsm_core.inspection.report import LayerReport
from nsm_core.model_info import ModelInfo
from nsm_core.state.report import Detail, StateReport
from nsm_core.stats import EngineStats
from nsm_core.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class UpstreamStats:
    """Of a backend whose engines are on other servers. The last three are counters.

    `num_failovers`: servers that requests lost and did without; `num_state_hits`: turns whose state was where they
    went, `num_state_misses`: turns whose state was sent along.
    """

    num_up: int
    num_down: int
    num_failovers: int
    num_state_hits: int
    num_state_misses: int


class Generation(Protocol):
    """A request that was admitted. Its events end with exactly one Finished."""

    def events(self) -> AsyncIterator[Event]:
        """Each event once, in order; to be iterated by one consumer."""
        ...

    def batches(self) -> AsyncIterator[list[Event]]:
        """The same events in lists, for a consumer to whom each answer costs: all that are there when it asks."""
        ...

    def cancel(self) -> None:
        """Ask the engine to stop within one step; Finished(reason=abort) still arrives. Idempotent, never blocks."""
        ...


@runtime_checkable
class Divertible(Protocol):
    """What a generation has besides, if its tokens need not wake the task that reads them."""

    def divert(self, take: TakeTokens) -> None:
        """From now on ids and texts of tokens that come while the consumer waits go to `take`, on the event loop, one
        by one or several together. What it returns is called at once, after `take` of other generations; if it is None
        the tokens go to the consumer.
        """
        ...


class InferenceBackend(Protocol):
    """Runs requests. Implementations: `local` (an engine in this process), `triton` (engines in Triton servers)."""

    @property
    def model(self) -> ModelInfo:
        """The served model and its tokenizer: some implementations know them only once they have started."""
        ...

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def max_requests(self) -> int:
        """Requests that it can hold, running and waiting: more at once are refused each time they are tried."""
        ...

    async def start(self) -> None:
        """Ready to serve when it returns. Raises CheckpointError or ConfigError, and then need not be stopped."""
        ...

    async def stop(self) -> None:
        """Ends running requests with Finished(reason=abort) and frees the device. Idempotent."""
        ...

    def require_room(self) -> None:
        """Raises Overloaded or EngineDead where `submit` would at this moment, whatever it is asked."""
        ...

    def submit(self, request: GenerationRequest) -> Generation:
        """Queue a request. Raises Overloaded (queue full), EngineDead, InvalidRequest or StateMismatch at once."""
        ...

    async def check_grammar(self, grammar: Grammar) -> None:
        """Returns when the grammar can be used, within seconds and without holding up others.

        Raises InvalidRequest with the reason, or Overloaded.
        """
        ...

    async def inspect_state(
        self, state: bytes | None, *, detail: Detail = Detail.LAYER, layer: int | None = None
    ) -> StateReport:
        """Describes a state beside the learned start (None: that itself), without a step of the engine.

        Raises InvalidRequest, and SnapshotCorrupt for bytes that are no state of this model.
        """
        ...

    async def inspect_text(
        self, state: bytes | None, ids: Sequence[int], *, has_tokens: bool = False
    ) -> tuple[LayerReport, ...]:
        """Reads `ids`, at least one, on top of a state (None: the start) and tells what the layers' states did.

        `has_tokens`: also how each of them was routed.

        Beside the engine, one such text at a time. Raises InvalidRequest, where it cannot be told at all too, and
        SnapshotCorrupt for bytes that are no state of this model.
        """
        ...

    def is_ready(self) -> bool:
        """True while the engine's step loop is alive and its heartbeat fresh."""
        ...

    def stats(self) -> EngineStats:
        """A consistent copy of the engine's counters."""
        ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeviceStats:
    """Of one engine among several. `engine`: its number, from 0 on; `num_requests`: of all gateways."""

    engine: int
    device: str
    is_up: bool
    num_requests: int


@runtime_checkable
class HasDevices(Protocol):
    """What a backend has besides, if it has an engine on each of several devices."""

    def device_stats(self) -> list[DeviceStats]: ...


def holder_of(backend: InferenceBackend) -> HoldsStates | None:
    """The backend, if its engine can hold states. A turn asks often, and a check for the protocol takes too long."""
    return cast(HoldsStates, backend) if hasattr(backend, "holds_states") else None


class HoldsStates(Protocol):
    """What a backend has besides, if its engine can hold states between requests (`GenerationRequest.hold_state`)."""

    @property
    def holds_states(self) -> bool:
        """Whether that is better than to take the bytes along."""
        ...

    async def fetch_state(self, number: int) -> bytes | None:
        """The bytes of a held state; None if the engine does not hold it any more. Raises EngineDead."""
        ...

    async def find_state(self, name: str) -> NamedState | None:
        """The state that was named so last, by whatever gateway of the engine. Raises EngineDead."""
        ...

    def name_state(self, name: str, number: int, about: bytes) -> None:
        """Gives a held state a name; the state that had it goes."""
        ...

    def forget_state(self, name: str) -> None:
        """The state of that name goes, if there is one."""
        ...

    def drop_state(self, number: int) -> None:
        """A held state without a name goes, if it is there."""
        ...


@runtime_checkable
class HasUpstreams(Protocol):
    """What a backend has besides, if its engines are on other servers."""

    def upstream_stats(self) -> UpstreamStats: ...
