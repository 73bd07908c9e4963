"""A request in an engine, as its consumer holds it. No torch here: the engine may be in another process."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable

from nsm_core.engine.event_queue import EventQueue, TakeTokens
from nsm_core.engine.request import Event, Finished, FinishReason, GenerationRequest, TokenEvent
from nsm_core.engine.stream_pace import StreamPace
from nsm_core.engine.token_text import TokenText
from nsm_core.errors import DeadlineExceeded, NsmError

# The engine ends a request at its deadline between two steps. If a step takes longer, the loop ends the request.
DEADLINE_GRACE_S = 0.5


class GenerationHandle:
    """A request in the engine. Its events end with exactly one Finished."""

    __slots__ = (
        *("__weakref__", "_cancel", "_events", "_listener", "_num_tokens", "_timer"),
        *("has_ended", "is_cancelled", "request"),
    )

    def __init__(
        self,
        request: GenerationRequest,
        cancel: Callable[[str], None],
        pace: StreamPace,
        text: TokenText | None = None,
    ) -> None:
        """`cancel` gets the request's id, never blocks and may be called at any time. `text`: see EventQueue."""
        self.request = request
        self._cancel = cancel
        self._events = EventQueue(pace, text)
        self._listener: Callable[[Event], None] | None = None
        self._num_tokens = 0
        self.has_ended = False
        self.is_cancelled = False
        self._timer: asyncio.TimerHandle | None = None

    def events(self) -> AsyncIterator[Event]:
        """Each event once, in order; for one consumer."""
        return self._events.events()

    def batches(self, *, hold_s: Callable[[], float] = lambda: 0.0) -> AsyncIterator[list[Event]]:
        """The same events in lists: all that are ready when the consumer asks. `hold_s`: see EventQueue."""
        return self._events.batches(hold_s=hold_s)

    def listen(self, listener: Callable[[Event], None]) -> None:
        """Instead of `events`: each event is given to `listener` when it comes. Before the first one."""
        self._listener = listener

    def divert(self, take: TakeTokens) -> None:
        """From now on tokens that come while the consumer waits go to `take`; see EventQueue."""
        self._events.divert(take)

    def cancel(self) -> None:
        """The request ends within one step; Finished(reason=abort) still arrives. Idempotent, never blocks."""
        self.is_cancelled = True
        self._cancel(self.request.request_id)

    def move(self, cancel: Callable[[str], None], pace: StreamPace) -> None:
        """Another engine has the request from now on, before its first event; `cancel`, `pace` as at the start."""
        self._cancel = cancel
        self._events.pace = pace

    def start_timer(self, loop: asyncio.AbstractEventLoop) -> None:
        """From now on the request ends soon after its deadline, whatever the engine's thread does."""
        deadline = self.request.deadline
        if deadline is not None and deadline != math.inf:
            self._timer = loop.call_later(deadline - time.monotonic() + DEADLINE_GRACE_S, self._expire)

    def deliver(self, event: Event) -> None:
        """On the event loop's thread. After the end, events are ignored."""
        if self.has_ended:
            return
        self._num_tokens += isinstance(event, TokenEvent)
        if isinstance(event, Finished):
            self.has_ended = True
            if self._timer is not None:
                self._timer.cancel()
        if self._listener is None:
            self._events.put(event)
        else:
            self._listener(event)

    def deliver_id(self, token_id: int) -> None:
        """`deliver` for a plain token whose text is made here."""
        if not self.has_ended:
            self._num_tokens += 1
            self._events.put_id(token_id)

    @property
    def num_tokens(self) -> int:
        """Delivered so far."""
        return self._num_tokens

    def _expire(self) -> None:
        self.fail(
            DeadlineExceeded(f"the deadline passed after {self._num_tokens} tokens, while the engine was in a step")
        )
        self.cancel()

    def fail(self, error: NsmError | None) -> None:
        """Ends the request with `error`, without the engine. None: it was cancelled."""
        request = self.request
        cached = 0 if request.resume is None else request.resume.position
        prompt_tokens = cached + len(request.prompt_ids)
        self.deliver(
            Finished(
                reason=FinishReason.ABORT if error is None else FinishReason.ERROR,
                prompt_tokens=prompt_tokens,
                cached_tokens=cached,
                completion_tokens=self._num_tokens,
                error=error,
            )
        )
