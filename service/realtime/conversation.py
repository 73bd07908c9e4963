"""A session of the store as a realtime conversation: items are read as they come, and answers are its turns.

Every item and every answer is a commit: whoever connects again, here or at another replica, goes on after the last one.
An item's id is its idempotency key, and so is the id of the event that asks for an answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
import uuid

from nsm_core.chat_template import ChatMessage, ChatTemplate
from nsm_core.errors import InvalidRequest, KeyReused, SessionBusy, VersionConflict
from nsm_core.hashing import identity
from service.deps import Arrival, Services
from service.generate.session_turn import SessionAnswer, open_session_turn
from service.named_states.create import border_text
from service.realtime.events import TextItem
from service.schemas.common import Limits
from service.schemas.sessions import GenerateBody, check_session_id, new_session_id
from service.state.chat_text import text_after
from service.stores.sessions.base import NewSession, SessionHead
from service.stores.sessions.key import SessionKey
from service.turns.append import AppendRequest, append_to_session
from service.turns.codec import digest_of
from service.turns.follower import POLL_S
from service.turns.lease import NO_CHUNKS
from service.web.errors import shown

INSTRUCTIONS = "realtime_instructions"  # metadata: a hash of those that the session has read


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ResponseOptions:
    """None: the server's default; of `max_tokens`, the most that it allows. `key`: the client's id of the event, with
    which a retry gets the same answer.
    """

    max_tokens: int | None = None
    temperature: float | None = None
    seed: int | None = None
    key: str | None = None

    def body(self, text: str, template: ChatTemplate, limits: Limits) -> GenerateBody:
        """Raises ValidationError or InvalidRequest."""
        max_tokens = limits.max_tokens if self.max_tokens is None else self.max_tokens
        given = {"max_tokens": max_tokens, "temperature": self.temperature, "seed": self.seed}
        fields = {name: value for name, value in given.items() if value is not None}
        return GenerateBody.model_validate({"input": text, "stream": True, "stop": [*template.stop], **fields})


@dataclasses.dataclass(slots=True)
class Conversation:
    """`services`: of the session's model. `instructions`: read before the first item."""

    services: Services
    key: SessionKey
    head: SessionHead
    instructions: str = ""

    @classmethod
    async def open(cls, services: Services, tenant: str, *, model: str | None, session_id: str | None) -> Conversation:
        """The session of that id, or a new one. Raises InvalidRequest, NotFound, StateMismatch or ModelUnavailable."""
        if session_id is None:
            own = await services.for_model(model)
            key = SessionKey(tenant, new_session_id())
            new = NewSession(key=key, model_fingerprint=own.backend.model.fingerprint, metadata={})
            head = await own.store.create(new)
        else:
            key = SessionKey(tenant, check_session_id(session_id))
            own = await services.for_session(key, model)
            head = await own.store.get(key)
        _require_borders(own.chat_template)
        return cls(own, key, head)

    async def instruct(self, text: str) -> None:
        """Raises InvalidRequest once other instructions, or none, were read."""
        digest = identity(text.encode())
        self.head = await self.services.store.get(self.key)
        if self.head.num_log_tokens and self.head.metadata.get(INSTRUCTIONS) != digest:
            raise InvalidRequest(
                "session.instructions cannot change: the conversation has begun with others",
                param="session.instructions",
            )
        self.instructions = text
        metadata = {**self.head.metadata, INSTRUCTIONS: digest}
        self.head = await self.services.store.update(self.key, metadata=metadata)

    async def read(self, item: TextItem, arrival: Arrival) -> None:
        """The item is read and committed when this returns; one of the same id is read once.

        While another turn has the session it waits, for as long as a lost server keeps its lease. Raises what an append
        raises.
        """
        while True:
            try:
                await self._append(item, arrival)
                return
            except SessionBusy:
                if await self._was_read(item):
                    return
                if time.monotonic() >= arrival.time + self.services.settings.lease_s:
                    raise
            await asyncio.sleep(POLL_S)

    async def _was_read(self, item: TextItem) -> bool:
        """Whether it is committed, which is known without a lease. Raises KeyReused."""
        identity = _identity(item)
        record = await self.services.store.get_turn(
            self.key, identity=identity, first_chunk=NO_CHUNKS, with_request=False
        )
        if record is None or record.status != "committed":
            return False
        if record.digest != _digest(item):
            raise _reused(item)
        return True

    async def _append(self, item: TextItem, arrival: Arrival) -> None:
        services, template = self.services, self.services.chat_template
        self.head = head = await services.store.get(self.key)
        messages = [ChatMessage(item.role, item.text)]
        if head.num_log_tokens == 0 and self.instructions:
            messages.insert(0, ChatMessage("system", self.instructions))
        if head.num_log_tokens == 0:
            text = border_text(template, messages)
        else:
            chat = await text_after(services.store, head, services.backend.tokenizer, template, messages)
            text = chat.text.removesuffix(_opening(template))
        try:
            done = await append_to_session(
                services.turns,
                services.backend,
                services.store,
                services.tenants,
                AppendRequest(
                    request_id=f"item-{uuid.uuid4().hex}",
                    key=self.key,
                    input_ids=tuple(await services.prompts.encode(text, param="item.content")),
                    is_verbatim=False,
                    expected_version=None,
                    arrival=arrival.time,
                    deadline=arrival.time + services.settings.request_timeout_s,
                    identity=_identity(item),
                    digest=_digest(item),
                ),
            )
        except KeyReused as error:
            raise _reused(item) from error
        self.head = done.head

    def check(self, options: ResponseOptions) -> None:
        """Raises ValidationError or InvalidRequest for what an answer would refuse."""
        services = self.services
        options.body("", services.chat_template, services.limits).to_request(services.limits, services.chat_template)

    async def answer(self, options: ResponseOptions, arrival: Arrival) -> SessionAnswer:
        """A turn that answers what was read. Raises what `open_session_turn` raises."""
        services, template = self.services, self.services.chat_template
        self.head = head = await services.store.get(self.key)
        if head.num_log_tokens == 0:
            raise InvalidRequest("there is nothing to answer: create an item first", param="response")
        text = _opening(template)
        marks = await services.store.log_marks(self.key)
        if marks and marks[-1].num_sampled > 0:  # another answer after the last one
            text = template.separator + text
        body = options.body(text, template, services.limits)
        key = None if options.key is None else f"response:{options.key}"
        # of the key alone: a new connection has other defaults, and the text depends on what was read since
        digest = digest_of({"response": options.key})
        return await open_session_turn(services, self.key, body, arrival, idempotency_key=key, digest=digest)

    async def cancel(self) -> None:
        with contextlib.suppress(VersionConflict):
            await self.services.turns_of(self.key).cancel(self.key)


def now(request_id: str) -> Arrival:
    return Arrival(request_id=request_id, time=time.monotonic())


def _identity(item: TextItem) -> str:
    return f"key:item:{item.id}"


def _digest(item: TextItem) -> str:
    return digest_of({"item": [item.role, item.text]})


def _reused(item: TextItem) -> KeyReused:
    message = f"item.id {shown(item.id)} was used before for another item; a new item needs a new id"
    return KeyReused(message, param="item.id")


def _opening(template: ChatTemplate) -> str:
    """What stands between the last message and its answer."""
    message = [ChatMessage("user", "")]
    return template.render(message).removeprefix(border_text(template, message))


def _require_borders(template: ChatTemplate) -> None:
    """Raises InvalidRequest for a template whose chats cannot be read message by message."""
    try:
        opening = _opening(template)
    except InvalidRequest as error:
        raise InvalidRequest("this model's chat template cannot be read item by item", param="model") from error
    if not opening or not template.separator:
        raise InvalidRequest("this model's chat template cannot be read item by item", param="model")
