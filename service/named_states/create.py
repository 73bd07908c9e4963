"""POST /v1/states as a use case: a text, a chat, a session or a file becomes the next version of a name."""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import uuid
from collections.abc import Iterator, Sequence

from nsm_core.chat_template import ChatMessage, ChatTemplate
from nsm_core.errors import InvalidRequest, NotFound
from nsm_core.state.quantize import StateFormat
from service.backends.base import InferenceBackend
from service.named_states.library import StateLibrary
from service.schemas.chat import core_messages
from service.schemas.states import CreateStateBody
from service.state.at_head import copy_with_head_state
from service.state.copies import read_copy
from service.state.earlier import copy_at
from service.state.keeper import StateKeeper
from service.state.log_location import LogLocation
from service.stores.sessions.base import SessionStore
from service.stores.sessions.key import SessionKey
from service.stores.states.base import NamedState
from service.transfer.session_file import SessionFile, read_file, write_file
from service.web.errors import shown


async def create_state(
    library: StateLibrary,
    sessions: SessionStore,
    keeper: StateKeeper,
    template: ChatTemplate,
    tenant: str,
    body: CreateStateBody,
    *,
    deadline: float,
) -> NamedState:
    """`deadline`: a `time.monotonic()` reading, for what is read. Raises as `StateLibrary.add`, and NotFound."""
    await library.require_own_name(tenant, body.name)
    text: str | None = None
    if body.session is not None:
        with library.tenants.enter(tenant), naming_field(body):
            file = await session_file(
                library.backend,
                sessions,
                keeper,
                SessionKey(tenant, body.session.id),
                body.session.location,
                deadline=deadline,
                state_format=library.state_format,
            )
    elif body.file is not None:
        with naming_field(body):
            file = await library.read_file(await asyncio.to_thread(_decode_file, body.file))
    else:
        messages = core_messages(body.messages or [], template)
        text = body.text if body.text is not None else border_text(template, messages)
        file = await _read(library, tenant, body, text, deadline)
    with naming_field(body):
        return await library.add(tenant, body.name, file, source=body.source, text=text, metadata=body.metadata)


@contextlib.contextmanager
def naming_field(body: CreateStateBody) -> Iterator[None]:
    """Errors of a file or a session get the name of the field of this body that they came in."""
    try:
        yield
    except NotFound as error:
        error.param = "session.id" if error.param == "session_id" else error.param
        raise
    except InvalidRequest as error:
        if error.param in (None, "state"):
            error.param = body.source if body.session is None else body.session.field
        raise


def border_text(template: ChatTemplate, messages: Sequence[ChatMessage]) -> str:
    """What a chat with these messages has read before its next message. Raises InvalidRequest."""
    rest = [ChatMessage("user", "")]
    whole, end = template.render([*messages, *rest]), template.render(rest)
    if template.has_own_system_message or not whole.endswith(end):
        raise InvalidRequest(
            "messages cannot be read as the beginning of a chat with this model's template: give their text",
            param="messages",
        )
    return whole.removesuffix(end)


async def _read(library: StateLibrary, tenant: str, body: CreateStateBody, text: str, deadline: float) -> SessionFile:
    ids = (await library.prompts.fresh(text, param=body.source)).ids
    with library.tenants.enter(tenant):
        return await library.reader(deadline).file_of(ids, tenant=tenant, name=body.name)


def _decode_file(data: str) -> bytes:
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidRequest(f"file must be base64, got {shown(data)}", param="file") from error


async def session_file(
    backend: InferenceBackend,
    sessions: SessionStore,
    keeper: StateKeeper | None,
    key: SessionKey,
    location: LogLocation | None,
    *,
    deadline: float,
    state_format: StateFormat,
) -> SessionFile:
    """The session at its newest commit, or at an earlier location: its state is made as for a fork."""
    copy = await read_copy(sessions, key)
    if location is not None:
        copy = await copy_at(
            backend,
            sessions,
            copy,
            location.num_log_tokens(copy.head, copy.marks),
            request_id=f"state-{uuid.uuid4().hex}",
            deadline=deadline,
            state_format=state_format,
        )
    copy = await copy_with_head_state(backend, keeper, copy, deadline=deadline)
    fingerprint = backend.tokenizer.fingerprint
    return await asyncio.to_thread(lambda: read_file(write_file(copy, tokenizer_fingerprint=fingerprint)))
