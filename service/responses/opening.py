"""The beginning of a stored response: a session that is free for its turn, the turn, and the records of both."""

from __future__ import annotations

import contextlib
import dataclasses

from nsm_core.errors import NotFound, SessionBusy, TurnCancelled, VersionConflict
from nsm_core.sampling.params import SamplingParams
from service.deps import TenantScope
from service.responses.chain import LogPosition, TurnPlan
from service.responses.conversations import Conversation, begin_turn
from service.responses.fork import create_session, fork_at
from service.responses.records import Draft, StoredResponse, let_go_of_sessions, put_response
from service.state.resume import TurnRequest
from service.turns.turn import Turn


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """`arrival`, `deadline`: `time.monotonic()` readings. `is_resumable`, `outlasts_engine`: see TurnRequest."""

    scope: TenantScope
    sampling: SamplingParams
    arrival: float
    deadline: float
    is_resumable: bool
    outlasts_engine: bool

    async def begin(
        self, draft: Draft, plan: TurnPlan, conversation: Conversation | None, *, is_shared: bool
    ) -> tuple[StoredResponse, Turn]:
        """`is_shared`: the session of `plan` stays as it is, and the turn runs on a fork of it.

        Raises the errors of `TurnRegistry.open_turn`, NotFound when the session is gone, VersionConflict when another
        try of the same response has begun.
        """
        position, turn = await self._turn(draft.response["id"], plan, conversation, is_shared=is_shared)
        stored = StoredResponse.begun(draft, plan.chain_to(position))
        scope = self.scope
        async with contextlib.AsyncExitStack() as undo:
            undo.push_async_callback(_stop, turn)
            if position != plan.start:
                undo.push_async_callback(self._discard, position)
            stored = await put_response(scope, stored, holds=stored.chain.session_ids)
            undo.push_async_callback(let_go_of_sessions, scope, stored.chain.session_ids)
            undo.push_async_callback(scope.delete_record, "response", stored.id)
            if conversation is not None:
                await begin_turn(scope, conversation, stored.id)
            undo.pop_all()
        if draft.earlier is not None:
            await let_go_of_sessions(scope, draft.earlier.chain.session_ids)
        return stored, turn

    async def _turn(
        self, response_id: str, plan: TurnPlan, conversation: Conversation | None, *, is_shared: bool
    ) -> tuple[LogPosition, Turn]:
        """The turn, and the position it begins at."""
        if plan.start is not None and not is_shared:
            try:
                return plan.start, await self._open(response_id, plan, plan.start)
            except SessionBusy:
                if conversation is not None:
                    raise
            except VersionConflict:
                pass  # the session has gone on from there
        position = await self._new_session(plan)
        try:
            return position, await self._open(response_id, plan, position)
        except BaseException:
            await self._discard(position)
            raise

    async def _discard(self, position: LogPosition) -> None:
        """Deletes a session that was made for this turn."""
        with contextlib.suppress(NotFound):
            await self.scope.services.turns.delete(self.scope.session_key(position.session_id))

    async def _new_session(self, plan: TurnPlan) -> LogPosition:
        stands_on = plan.stands_on
        if stands_on is None:
            return await create_session(self.scope, plan.state)
        return await fork_at(self.scope, stands_on, deadline=self.deadline)

    async def _open(self, response_id: str, plan: TurnPlan, position: LogPosition) -> Turn:
        return await self.scope.services.turns.open_turn(self.turn_request(response_id, plan, position))

    def turn_request(self, response_id: str, plan: TurnPlan, position: LogPosition) -> TurnRequest:
        """The ids begin a text themselves on a new session, and the seed is this response's own: two answers to one
        question differ.
        """
        return TurnRequest(
            request_id=response_id,
            key=self.scope.session_key(position.session_id),
            input_ids=plan.input_ids,
            is_verbatim=True,
            sampling=self.sampling,
            has_own_seed=True,
            expected_version=position.version,
            arrival=self.arrival,
            deadline=self.deadline,
            is_resumable=self.is_resumable,
            outlasts_engine=self.outlasts_engine,
            after=plan.after if position == plan.start else None,
            num_opening=plan.num_opening,
        )


async def _stop(turn: Turn) -> None:
    turn.stop(TurnCancelled("the response was not begun"))
    await turn.ended.wait()
