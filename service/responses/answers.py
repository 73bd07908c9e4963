"""A response on its way to a client: as one object, or as the numbered events of a stream."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import Protocol

from nsm_core.engine.request import Finished
from nsm_core.errors import NotFound, NsmError, TurnCancelled
from service.deps import Services, TenantScope
from service.generate.chat import PrefixCutter
from service.generate.choices import ends_of
from service.responses.format import (
    Event,
    Response,
    ended_response,
    failed_response,
    opening_of,
    status_of,
)
from service.responses.records import StoredResponse
from service.responses.running import ResponseText, finish_response, refresh_status, wait_for_result
from service.responses.stream import ResponseStream, output_of
from service.responses.unstored import Unstored
from service.schemas.items import new_item_id
from service.turns.turn import HandedOver, Turn, TurnOutcome, TurnSource
from service.web.errors import report


class ResponseAnswer(Protocol):
    """Read `batches` or `collect`, once; then, whatever happened, call `leave`, which never blocks."""

    def batches(self) -> AsyncGenerator[list[Event], None]:
        """The events in order, together those that are there when the reader comes for more."""
        ...

    async def collect(self) -> Response: ...

    def leave(self) -> None: ...


class StoredAnswer:
    """A response whose turn was begun for this client. `ending`: the task that stores its end."""

    def __init__(
        self,
        services: Services,
        stored: StoredResponse,
        turn: Turn,
        ending: asyncio.Task[StoredResponse],
        *,
        is_background: bool,
    ) -> None:
        self._services = services
        self._stored = stored
        self._turn = turn
        self._ending = ending
        self._is_background = is_background
        if is_background:
            turn.follow()  # a reader that never leaves: nobody needs to wait for this turn

    def leave(self) -> None:
        """The turn goes on to its commit, so that the client can come back to it."""
        self._turn.detach()

    async def batches(self) -> AsyncGenerator[list[Event], None]:
        """Ends with the response as it was stored."""
        num_given = 0
        async with contextlib.aclosing(_until_end(self._services, self._stored, self._turn)) as batches:
            async for batch in batches:
                num_given += len(batch)
                yield batch
                if any(event.get("delta") for event in batch):  # the consumer is back: the connection has the pieces
                    self._turn.delivered()
        ended = await asyncio.shield(self._ending)
        _require_ended(ended, self._turn.end)
        yield _events_of(ended)[num_given:]

    async def collect(self) -> Response:
        """Raises what kept the turn from being committed, unless somebody cancelled it."""
        if self._is_background:
            return self._stored.response
        ended = (await asyncio.shield(self._ending)).response
        error = None if self._turn.end is None else self._turn.end.error
        if error is not None and ended["status"] in ("failed", "in_progress"):
            raise error
        self._turn.delivered()
        return ended


class ReadAnswer:
    """A response that was begun before, wherever its turn runs now, or its stored result."""

    def __init__(self, scope: TenantScope, stored: StoredResponse) -> None:
        self._scope = scope
        self._stored = stored
        self._source: TurnSource | None = None

    def leave(self) -> None:
        if self._source is not None:
            self._source.detach()

    async def batches(self) -> AsyncGenerator[list[Event], None]:
        """From the first one, each as the first client got it."""
        stored = await refresh_status(self._scope, self._stored)
        if stored.has_ended:
            yield _events_of(stored)
            return
        key = self._scope.session_key(stored.chain.end.session_id)
        services = (await self._scope.for_session(key.session_id)).services
        text, num_given, ended = ResponseText(services), 0, None
        try:
            self._source = await services.turns.follow(key, turn_id=stored.id)
            async with contextlib.aclosing(_until_end(services, stored, self._source, text)) as batches:
                async for batch in batches:
                    num_given += len(batch)
                    yield batch
        except (NotFound, TurnCancelled):  # it ended without an end of its own
            ended = await wait_for_result(self._scope, stored)
        ended = ended or await finish_response(self._scope, stored, text)
        _require_ended(ended, text.end)
        yield _events_of(ended)[num_given:]

    async def collect(self) -> Response:
        """Of one that runs in the background: as it is now."""
        stored = await refresh_status(self._scope, self._stored)
        if not stored.has_ended and not stored.response["background"]:
            stored = await wait_for_result(self._scope, stored)
            _require_ended(stored, None)
        return stored.response


class UnstoredResponse:
    """A response of which nothing is kept: it ends when its client leaves."""

    def __init__(self, services: Services, unstored: Unstored, opened: Response) -> None:
        self._group = unstored.group
        self._returned = unstored.returned
        self._opened = opened
        self._item_id = new_item_id()
        self._template = services.chat_template
        self._cutter = PrefixCutter(services.chat_template.answer_prefix)
        self._texts: list[str] = []

    def leave(self) -> None:
        self._group.cancel()

    async def batches(self) -> AsyncGenerator[list[Event], None]:
        """A failure is an event too."""
        reasoning, form = self._template.reasoning, self._template.tool_form
        stream = ResponseStream(self._opened, self._item_id, reasoning=reasoning, tool_form=form)
        yield stream.begin()
        try:
            async with contextlib.aclosing(self._pieces()) as batches:
                async for pieces in batches:
                    events = stream.feed(pieces)
                    if events:
                        yield events
            ended = await self._ended()
        except NsmError as error:
            report(error, request_id=self._opened["id"])
            ended = failed_response(self._opened, error)
        yield stream.end(ended)

    async def collect(self) -> Response:
        async with contextlib.aclosing(self._pieces()) as batches:
            async for _ in batches:
                pass
        return await self._ended()

    async def _pieces(self) -> AsyncGenerator[list[str], None]:
        """`_texts`, as they are added to."""
        async with contextlib.aclosing(self._group.batches()) as batches:
            async for batch in batches:
                pieces = [self._cutter.cut(delta) for _, delta in batch if delta.text]
                self._texts += pieces
                if pieces:
                    yield pieces

    async def _ended(self) -> Response:
        finished: Finished = ends_of(self._group)[0]
        output = output_of(
            self._opened,
            self._item_id,
            self._texts,
            status=status_of(finished),
            reasoning=self._template.reasoning,
            tool_form=self._template.tool_form,
        )
        num_thought = output.num_thought_pieces
        ended = ended_response(self._opened, finished, output.items, reasoning_tokens=num_thought)
        if self._returned is None:
            return ended
        return {**ended, "state": await self._returned.object(self._group.take_end_state())}


async def _until_end(
    services: Services, stored: StoredResponse, source: TurnSource, text: ResponseText | None = None
) -> AsyncGenerator[list[Event], None]:
    """The events up to the last piece of text; `text` is left with all of them, and with the turn's end."""
    text = text or ResponseText(services)
    stream = _stream_of(stored)
    yield stream.begin()
    async with contextlib.aclosing(source.batches()) as batches:
        async for turn_events in batches:
            events = stream.feed([piece for piece in map(text.feed, turn_events) if piece is not None])
            if events:
                yield events


def _require_ended(stored: StoredResponse, end: TurnOutcome | None) -> None:
    """Raises why the client cannot have the end here; it can come back for it."""
    if not stored.has_ended:
        raise (None if end is None else end.error) or HandedOver()


def _stream_of(stored: StoredResponse) -> ResponseStream:
    return ResponseStream(
        opening_of(stored.response), stored.item_id, reasoning=stored.reasoning, tool_form=stored.tool_form
    )


def _events_of(stored: StoredResponse) -> list[Event]:
    """All events of an ended response."""
    stream = _stream_of(stored)
    return [*stream.begin(), *stream.feed(stored.deltas), *stream.end(stored.response)]
