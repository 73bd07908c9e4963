"""One session spoken to through the model's chat template, message by message."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
import uuid
from collections.abc import AsyncIterator, Callable

from nsm_core.chat_template import ChatMessage
from nsm_core.engine.request import TokenEvent
from nsm_core.errors import InvalidRequest, NotFound, StateMismatch, TurnCancelled
from nsm_core.sampling.params import SamplingParams
from service.app import create_app
from service.deps import Services
from service.messages import quoted
from service.schemas.sessions import GENERATED_PREFIX, SESSION_ID, new_session_id
from service.server import make_backend
from service.settings import Settings
from service.state.chat_text import ChatText, turn_text_after
from service.state.message_border import opening_of_turn
from service.state.other_model import shown_model
from service.state.resume import TurnRequest
from service.stores.sessions.base import DEFAULT_TENANT, NewSession, SessionHead
from service.stores.sessions.factory import make_store
from service.stores.sessions.key import SessionKey
from service.turns.turn import Turn, TurnOutcome

_ANY = "\0"  # stands for a message where a template is taken apart


@dataclasses.dataclass(frozen=True, slots=True)
class Exchange:
    """A message and its answer."""

    message: str
    answer: str


class Conversation:
    """A session and its turns. `head` is None before the first turn of a new session."""

    def __init__(
        self, services: Services, *, session_id: str | None, sampling: SamplingParams, has_own_seed: bool
    ) -> None:
        self.session_id = new_session_id() if session_id is None else session_id
        self.head: SessionHead | None = None
        self.is_new = True
        self._backend = services.backend
        self._store = services.store
        self._turns = services.turns
        self._prompts = services.prompts
        self._template = services.chat_template
        self._sampling = dataclasses.replace(sampling, stop=(*sampling.stop, *self._template.stop))
        self._has_own_seed = has_own_seed

    async def resume(self) -> None:
        """Finds the session; an id of the user's own without a session begins one.

        Raises InvalidRequest for a malformed id, NotFound for a generated id without a session (it was deleted), and
        StateMismatch when another model made the session.
        """
        if not SESSION_ID.fullmatch(self.session_id):
            raise InvalidRequest(
                f"a session's id must be 1 to 64 characters of A-Z, a-z, 0-9, _ and -, got {quoted(self.session_id)}"
            )
        try:
            head = await self._store.get(self._key)
        except NotFound:
            if self.session_id.startswith(GENERATED_PREFIX):
                raise
            return
        fingerprint = self._backend.model.fingerprint
        if head.model_fingerprint != fingerprint:
            raise StateMismatch(
                f"session {self.session_id!r} was made by model {shown_model(head.model_fingerprint)}, "
                f"this is {shown_model(fingerprint)}: name the right one with --model, or move it to this one with "
                "`nsm sessions migrate`"
            )
        self.head, self.is_new = head, False

    async def say(self, message: str, *, show: Callable[[str], None]) -> None:
        """One turn, committed when it returns; `show` gets the answer as it comes.

        Raises the errors of `TurnRegistry.open_turn` and of the turn, and TurnCancelled when this task is cancelled.
        """
        turn = await self._open_turn(message)
        end = await self._follow(turn, _without_prefix(self._template.answer_prefix, show))
        if end.error is not None:
            raise end.error
        self.head = end.head

    async def last_exchange(self) -> Exchange | None:
        """The newest message and its answer, if the log ends with them in the template's form."""
        text = self._backend.tokenizer.decode(await self._store.read_log(self._key))
        for form in (self._template.render_next(ChatMessage("user", _ANY)), self._first(_ANY)):
            before, between = form.split(_ANY)
            _, is_found, newest = text.rpartition(before)
            message, is_answered, answer = newest.partition(between)
            if is_found and is_answered:
                return Exchange(message, answer.removeprefix(self._template.answer_prefix))
        return None

    async def tidy(self) -> None:
        """A new session without a turn is deleted."""
        if self.is_new and self.head is not None and (await self._store.get(self._key)).version == 0:
            await self._turns.delete(self._key)

    @property
    def _key(self) -> SessionKey:
        return SessionKey(DEFAULT_TENANT, self.session_id)

    def _first(self, message: str) -> str:
        return self._template.render([ChatMessage("user", message)])

    async def _next(self, head: SessionHead, message: str) -> ChatText:
        tokenizer, template = self._backend.tokenizer, self._template
        messages = [ChatMessage("user", message)]
        return await turn_text_after(self._store, head, tokenizer, template, messages, answering=template)

    async def _open_turn(self, message: str) -> Turn:
        head = await self._newest_head()
        chat = ChatText(text=self._first(message)) if head is None else await self._next(head, message)
        input_ids = tuple(await self._prompts.encode(chat.text, param="the message"))
        head = head or await self._create()
        request = TurnRequest(
            request_id=uuid.uuid4().hex,
            key=self._key,
            input_ids=input_ids,
            is_verbatim=False,
            sampling=self._sampling,
            has_own_seed=self._has_own_seed,
            arrival=time.monotonic(),
            expected_version=head.version,
            after=chat.after,
            num_opening=opening_of_turn(self._backend.tokenizer, self._template, input_ids),
        )
        return await self._turns.open_turn(request)

    async def _newest_head(self) -> SessionHead | None:
        """Another process may have continued the session since."""
        return None if self.head is None else await self._store.get(self._key)

    async def _create(self) -> SessionHead:
        fingerprint = self._backend.model.fingerprint
        self.head = await self._store.create(NewSession(key=self._key, model_fingerprint=fingerprint, metadata={}))
        return self.head

    async def _follow(self, turn: Turn, show: Callable[[str], None]) -> TurnOutcome:
        try:
            async with contextlib.aclosing(turn.events()) as events:
                async for event in events:
                    if isinstance(event, TokenEvent):
                        show(event.text)
                    elif isinstance(event, TurnOutcome):
                        show(event.finished.text)
        except asyncio.CancelledError:  # Ctrl-C: this answer ends, not the conversation
            turn.stop(TurnCancelled("stopped; this turn was not saved"))
        await turn.ended.wait()
        if turn.end is None:
            raise RuntimeError("the turn ended without an end")
        return turn.end


@contextlib.asynccontextmanager
async def opened(
    settings: Settings, *, session_id: str | None, sampling: SamplingParams, has_own_seed: bool
) -> AsyncIterator[Conversation]:
    """The session that was left, or a new one, in the application that a server would run, less the server."""
    store = make_store(settings)  # may refuse: before the model is loaded
    app = create_app(settings, make_backend(settings), store)
    async with app.router.lifespan_context(app):
        conversation = Conversation(
            app.state.services, session_id=session_id, sampling=sampling, has_own_seed=has_own_seed
        )
        if session_id is not None:
            await conversation.resume()
        yield conversation
        await conversation.tidy()


def _without_prefix(prefix: str, show: Callable[[str], None]) -> Callable[[str], None]:
    """`show`, without `prefix` (one character or none) at the beginning of the text."""
    is_first = True

    def show_rest(text: str) -> None:
        nonlocal is_first
        if text:
            show(text.removeprefix(prefix) if is_first else text)
            is_first = False

    return show_rest
