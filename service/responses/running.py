"""Responses to their end: what their turn gave becomes the stored object, whoever is still there to read it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging

from nsm_core.errors import LeaseLost, NotFound, NsmError, StoreUnavailable, TurnCancelled, VersionConflict
from service.deps import Services, TenantScope
from service.generate.chat import PrefixCutter
from service.generate.deltas import Delta
from service.responses.chain import LogPosition
from service.responses.conversations import finish_turn
from service.responses.format import cancelled_response, ended_response, failed_response, status_of
from service.responses.records import StoredResponse, load_response, put_response
from service.responses.stream import output_of
from service.state.message_border import find_border
from service.stores.sessions.base import LogPoint
from service.stores.sessions.turn_records import TurnRecord
from service.turns.lease import NO_CHUNKS
from service.turns.turn import HandedOver, Turn, TurnEvent, TurnOutcome

logger = logging.getLogger("nsm.responses")

UNSURE = (LeaseLost, StoreUnavailable)  # ends of a turn after which somebody else may know better


class ResponseText:
    """A turn's events -> the pieces of its answer: one for each token, and one for text that the end released."""

    def __init__(self, services: Services) -> None:
        self._cutter = PrefixCutter(services.chat_template.answer_prefix)
        self.deltas: list[str] = []
        self.end: TurnOutcome | None = None

    def feed(self, event: TurnEvent) -> str | None:
        """The piece that this event gives, if it gives one; it may be empty."""
        if isinstance(event, TurnOutcome):
            self.end = event
            if not event.finished.text:
                return None
            text = event.finished.text
        else:
            text = event.text
        self.deltas.append(self._cutter.cut(Delta(text=text)))
        return self.deltas[-1]


def save_when_ended(scope: TenantScope, stored: StoredResponse, turn: Turn) -> asyncio.Task[StoredResponse]:
    """A task that stores the end of a turn of this process. It does not count as a reader of the turn."""

    async def run() -> StoredResponse:
        with scope.services.lifecycle.track():
            text = ResponseText(scope.services)
            async with contextlib.aclosing(turn.all_events()) as events:
                async for event in events:
                    text.feed(event)
            return await finish_response(scope, stored, text)

    return scope.services.background.start(run())


async def finish_response(scope: TenantScope, stored: StoredResponse, text: ResponseText) -> StoredResponse:
    """The response after its turn has ended here; still in progress when the turn goes on elsewhere, or may do so."""
    error = None if text.end is None else text.end.error
    if isinstance(error, HandedOver):
        return stored
    if not isinstance(error, UNSURE):
        return await save_result(scope, stored, text)
    try:
        turn = await _brief_record(scope, stored)
        if turn is not None and turn.result is not None and turn.status != "committed":
            return await save_result(scope, stored, text)  # this is how the turn itself ended
        return await wait_for_result(scope, stored)
    except NsmError as store_error:
        logger.warning("the end of response %s is not known yet: %s", stored.id, store_error)
        return stored


async def _brief_record(scope: TenantScope, stored: StoredResponse) -> TurnRecord | None:
    """What the record of the response's turn says, without request and chunks."""
    return await scope.services.store.get_turn(
        scope.session_key(stored.chain.end.session_id),
        turn_id=stored.id,
        first_chunk=NO_CHUNKS,
        with_request=False,
    )


async def save_result(
    scope: TenantScope, stored: StoredResponse, text: ResponseText, error: NsmError | None = None
) -> StoredResponse:
    """The response as it ended, also when it could not be stored so: whoever reads it next will.

    `error`: why the turn's own end is not known.
    """
    ended = await _with_border(scope, _ended(stored, text, error), text)
    try:
        ended = await put_response(scope, ended)
    except VersionConflict:  # somebody else stored the same end, or it was deleted
        with contextlib.suppress(NotFound):
            ended = await load_response(scope, stored.id)
    except NsmError as store_error:
        logger.warning("the end of response %s was not stored: %s", stored.id, store_error)
        return ended
    try:
        await finish_turn(scope, ended)
    except NsmError as store_error:
        logger.warning("response %s was not added to its conversation: %s", stored.id, store_error)
    return ended


async def _with_border(scope: TenantScope, ended: StoredResponse, text: ResponseText) -> StoredResponse:
    """The response with the place before its answer, if that began with a thought."""
    if ended.reasoning == "none" or text.end is None or text.end.error is not None:
        return ended
    end, services = ended.chain.end, scope.services
    try:
        border = await find_border(
            services.store,
            scope.session_key(end.session_id),
            LogPoint(end.version, end.num_log_tokens),
            services.backend.tokenizer,
            services.chat_template,
        )
    except NsmError as error:  # the next turn then stands on the thought too
        logger.warning("where the thought of response %s begins is not known: %s", ended.id, error)
        return ended
    return dataclasses.replace(ended, chain=dataclasses.replace(ended.chain, border=border))


def _ended(stored: StoredResponse, text: ResponseText, error: NsmError | None) -> StoredResponse:
    end = text.end
    error = error or (None if end is None else end.error)
    if isinstance(error, TurnCancelled):
        response = cancelled_response(stored.response)
    elif error is not None or end is None:
        response = failed_response(stored.response, error or _lost())
    else:
        head, before = end.head, stored.chain.end
        position = LogPosition(session_id=before.session_id, version=head.version, num_log_tokens=head.num_log_tokens)
        output = output_of(
            stored.response,
            stored.item_id,
            text.deltas,
            status=status_of(end.finished),
            reasoning=stored.reasoning,
            tool_form=stored.tool_form,
        )
        num_thought = output.num_thought_pieces
        response = ended_response(stored.response, end.finished, output.items, reasoning_tokens=num_thought)
        stored = dataclasses.replace(stored, chain=dataclasses.replace(stored.chain, end=position))
    return dataclasses.replace(stored, response=response, deltas=text.deltas)


async def refresh_status(scope: TenantScope, stored: StoredResponse) -> StoredResponse:
    """The response as it is now. One whose process was lost is taken over, or found to have ended."""
    if stored.has_ended:
        return stored
    key = scope.session_key(stored.chain.end.session_id)
    turn = await scope.services.store.get_turn(key, turn_id=stored.id, first_chunk=NO_CHUNKS)
    if turn is None:
        return await save_result(scope, stored, ResponseText(scope.services), _lost())
    if turn.status == "running":
        if not turn.lease_left_s:
            own = await scope.for_session(key.session_id)
            taken = await own.services.turns.take_over(key, stored.id)
            if taken is not None:
                save_when_ended(own, stored, taken)
        return stored
    return await wait_for_result(scope, stored)


async def wait_for_result(scope: TenantScope, stored: StoredResponse) -> StoredResponse:
    """Waits for the end of a turn that runs anywhere, or reads its stored result.

    Still in progress when the turn was handed over: this process stops.
    """
    key = scope.session_key(stored.chain.end.session_id)
    scope = await scope.for_session(key.session_id)
    text = ResponseText(scope.services)
    try:
        source = await scope.services.turns.follow(key, turn_id=stored.id)
        async with contextlib.aclosing(source.events()) as events:
            async for event in events:
                text.feed(event)
    except NotFound:
        return await save_result(scope, stored, text, _lost())
    except TurnCancelled as error:  # without an end of its own
        turn = await _brief_record(scope, stored)
        was_cancelled = turn is not None and turn.status == "cancelled"
        return await save_result(scope, stored, text, error if was_cancelled else _lost())
    return await finish_response(scope, stored, text)


def _lost() -> NsmError:
    return NsmError("the server that ran this response was lost, and nothing of it was kept: create it again")
