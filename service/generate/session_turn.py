"""A session's turn over HTTP: completion objects that also tell where the session is, whole or as a stream.

The frames of a stream are numbered, so that a client that lost its connection can read on: a frame with text has the
number of its last token in the turn. The closing frames go on counting after the last token, and each has a number of
its own: n + 1 is text that the end released, n + 2 the finish reason, n + 3 the usage.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from starlette.responses import Response

from nsm_core.engine.request import TokenEvent
from nsm_core.engine.stream_pace import Write
from nsm_core.errors import InvalidRequest
from nsm_core.random_ids import random_id
from service.deps import Arrival, Services
from service.generate.completions import KIND, ChoiceText, text_piece
from service.generate.deltas import Delta, DeltaBuilder
from service.generate.openai_format import Envelope, usage
from service.generate.structured import with_grammar
from service.schemas.chat import core_messages
from service.schemas.sessions import SESSION_ID, GenerateBody
from service.state.chat_text import turn_text_after
from service.state.message_border import opening_of_turn
from service.state.resume import TurnRequest
from service.stores.sessions.base import LogPoint
from service.stores.sessions.key import SessionKey
from service.turns.codec import digest_of
from service.turns.follower import stream_not_found
from service.turns.turn import Turn, TurnOutcome, TurnSource
from service.web.errors import shown
from service.web.json_body import json_response
from service.web.sse import EventStream, PartWriter, TextFrame, frame, require_within, until_done, write_nothing

IDEMPOTENCY_KEY = re.compile(r"[!-~]{1,255}")
REPLAYED = "idempotent-replayed"  # header of an answer whose turn an earlier try had begun
_STREAM_ID = re.compile(r"cmpl-[0-9a-f]{32}-(?P<session_id>.+)")


class SessionAnswer:
    """A turn that was begun. Read `frames` or `collect`, once; then, whatever happened, `leave`."""

    def __init__(self, services: Services, source: TurnSource, *, has_usage_chunk: bool) -> None:
        render_options, tokenizer = source.render_options, services.backend.tokenizer
        self.is_replay = source.is_replay
        self._source = source
        self._view = DeltaBuilder(tokenizer)
        self._num_tokens = 0  # the number of the last one that was read or shown
        self._writer: PartWriter | None = None
        has_logprobs, has_routing = render_options.get("has_logprobs", False), render_options.get("has_routing", False)
        self._text = ChoiceText(tokenizer, has_logprobs=has_logprobs, has_routing=has_routing)
        self._has_usage_chunk = has_usage_chunk
        self._has_energy = render_options.get("has_energy", False)
        self._envelope = Envelope(
            id=source.turn_id,
            created=render_options.get("created", int(time.time())),
            model=render_options.get("model", services.model_name),
            system_fingerprint=render_options.get("system_fingerprint", services.system_fingerprint),
        )

    def leave(self) -> None:
        """The turn goes on to its commit, so that the client can come back to it."""
        self._source.detach()

    def attach(self, writer: PartWriter) -> None:
        """Before `frames`: plain text may be written by `writer` while the frames wait."""
        self._writer = writer

    async def frames(self, *, after: int = 0) -> AsyncGenerator[bytes, None]:
        """The frames numbered above `after`, together those that are ready together; the one with the finish reason
        tells where the session is. Raises InvalidRequest at the end if that comes before `after`.
        """
        number, text_frame = 0, TextFrame(lambda text: frame(self._chunk(text_piece(text))))
        async with contextlib.aclosing(self.deltas()) as batches:
            async for batch in batches:
                frames: list[bytes] = []
                for number, delta in batch:
                    if self._text.is_plain(delta):
                        made = [_numbered(number, text_frame(delta.text))]
                    else:
                        made = [frame(self._chunk(piece), event_id=number) for piece in self._text.pieces(delta)]
                    frames += made if number > after else ()
                if frames:
                    yield b"".join(frames)
                    if any(delta.text for _, delta in batch):  # the consumer is back: the connection has the text
                        self._source.delivered()
                        self._show_directly(text_frame)
        if self._has_usage_chunk and after < number + 1:
            chunk = self._envelope.wrap(KIND, [], usage=self._usage())
            yield frame(chunk, event_id=number + 1)
        require_within(after, last=number + (1 if self._has_usage_chunk else 0))

    def _show_directly(self, text_frame: TextFrame) -> None:
        """Text goes to the connection without a task's turn, where turn and connection take it so."""
        writer, self._writer = self._writer, None
        if writer is not None and isinstance(self._source, Turn) and self._text.is_plain(Delta()):
            self._source.show_by(functools.partial(self._shown, writer, text_frame))

    def _shown(self, writer: PartWriter, text_frame: TextFrame, first: int, texts: Sequence[str]) -> Write | None:
        if len(texts) == 1:
            data = _numbered(first, text_frame(texts[0])) if texts[0] else b""
        else:
            shown = [_numbered(number, text_frame(text)) for number, text in enumerate(texts, start=first) if text]
            data = b"".join(shown)
        write = writer(data) if data else write_nothing
        if write is not None:
            self._num_tokens = first + len(texts) - 1
        return write

    async def collect(self) -> dict[str, Any]:
        """The whole answer as one object."""
        pieces: list[dict[str, Any]] = []
        async with contextlib.aclosing(self.deltas()) as batches:
            async for batch in batches:
                for _, delta in batch:
                    if delta.text:
                        self._source.delivered()
                    pieces += self._text.pieces(delta)
        choices = [{"index": 0, **self._text.join(pieces)}]
        return self._envelope.wrap(KIND, choices, usage=self._usage(), session=self._session())

    async def deltas(self) -> AsyncGenerator[list[tuple[int, Delta]], None]:
        """Each with its number. Ends with the one that has the finish reason, or raises the error of the turn."""
        async with contextlib.aclosing(self._source.batches()) as batches:
            async for events in batches:
                batch: list[tuple[int, Delta]] = []
                for event in events:
                    if isinstance(event, TokenEvent):
                        self._num_tokens = event.index
                        batch += [(event.index, delta) for delta in self._view.feed(event)]
                    elif event.error is None:
                        for delta in self._view.feed(event.finished):
                            batch.append((self._num_tokens + (1 if delta.finished is None else 2), delta))
                    else:
                        if batch:  # deltas before the error are shown
                            yield batch
                        raise event.error
                if batch:
                    yield batch

    def _chunk(self, piece: dict[str, Any]) -> dict[str, Any]:
        fields: dict[str, Any] = {"usage": None} if self._has_usage_chunk else {}
        if piece["finish_reason"] is not None:
            fields["session"] = self._session()
        return self._envelope.wrap(KIND, [{"index": 0, **piece}], **fields)

    def delivered(self) -> None:
        """The client has the first text."""
        self._source.delivered()

    @property
    def turn_id(self) -> str:
        return self._source.turn_id

    @property
    def outcome(self) -> TurnOutcome:
        """How the turn ended, once it has."""
        if self._source.end is None:
            raise RuntimeError("the turn has not ended")
        return self._source.end

    def _usage(self) -> dict[str, Any]:
        return usage([self.outcome.finished], has_energy=self._has_energy)

    def _session(self) -> dict[str, Any]:
        head = self.outcome.head
        session: dict[str, Any] = {"id": head.session_id, "version": head.version, "position": head.position}
        if self._source.other_numerics is not None:
            session["taken_over_from"] = self._source.other_numerics
        if self._source.rebuilt is not None:
            session["rebuilt"] = self._source.rebuilt
        if self._has_energy:
            session["energy_joules"] = self.outcome.session_joules
        return session


def _numbered(number: int, text_frame: bytes) -> bytes:
    return b"id: %d\n%s" % (number, text_frame)


async def open_session_turn(
    services: Services,
    key: SessionKey,
    body: GenerateBody,
    arrival: Arrival,
    *,
    idempotency_key: str | None = None,
    digest: str | None = None,
) -> SessionAnswer:
    """Checks the body and begins the turn; errors become the answer's status. `digest`: None for that of the body."""
    services = await services.for_session(key, body.model)
    spec = body.to_request(services.limits, services.chat_template)
    services.prompts.check_size(body.input, param="input")
    if digest is None and (idempotency_key is not None or body.expected_version is not None):
        digest = digest_of(body.model_dump(exclude=body.digest_exclude))
    digest = digest or ""  # a turn that nobody can ask for again needs none
    identity = retry_identity(idempotency_key, body.expected_version, digest)
    if identity is not None and spec.sampling.grammar is not None:  # which the engine compiles: it may be away
        committed = await services.turns.committed(key, identity=identity, digest=digest)
        if committed is not None:
            return SessionAnswer(services, committed, has_usage_chunk=body.has_usage_chunk)
    spec = await with_grammar(services, key.tenant, spec, arrival)
    if identity is None:  # a retry joins its first try even when the engine is full
        services.backend.require_room()
    read = await _read_input(services, key, body)
    request = TurnRequest(
        request_id=f"cmpl-{random_id()}-{key.session_id}",
        key=key,
        input_ids=read.ids,
        is_verbatim=isinstance(body.input, list),
        after=read.after,
        num_opening=read.num_opening,
        sampling=spec.sampling,
        has_own_seed=body.seed is not None,
        expected_version=read.version,
        arrival=arrival.time,
        deadline=arrival.time + spec.timeout_s,
        identity=identity,
        digest=digest,
        render_options={
            "created": int(time.time()),
            "model": services.model_name,
            "system_fingerprint": services.system_fingerprint,
            "has_logprobs": body.logprobs is not None,
            "has_usage_chunk": body.has_usage_chunk,
            "has_energy": body.include_energy,
            "has_routing": body.include_routing,
        },
        include_routing=spec.include_routing,
        is_resumable=body.stream,
    )
    source = await services.turns.open_or_join(request)
    if not source.is_replay:
        services.metrics.requests.body_accepted(n=1, max_tokens=spec.max_tokens)
    return SessionAnswer(services, source, has_usage_chunk=body.has_usage_chunk)


async def open_stream(services: Services, tenant: str, stream_id: str) -> SessionAnswer:
    """A turn's stream from its start, framed as it was asked for. Raises NotFound."""
    found = _STREAM_ID.fullmatch(stream_id)
    if found is None or not SESSION_ID.fullmatch(found["session_id"]):
        raise stream_not_found(stream_id)
    key = SessionKey(tenant, found["session_id"])
    services = await services.for_session(key)
    source = await services.turns.follow(key, turn_id=stream_id)
    services.metrics.sessions.stream_resumed()
    return SessionAnswer(services, source, has_usage_chunk=source.render_options.get("has_usage_chunk", False))


async def send_turn(answer: SessionAnswer, *, is_stream: bool, request_id: str, after: int = 0) -> Response:
    """However it ends, also when the client leaves (this task is then cancelled), the answer is left at last."""
    response: Response
    if is_stream:
        frames = until_done(answer.frames(after=after), request_id=request_id)
        response = EventStream(frames, on_close=answer.leave, on_open=answer.attach)
    else:
        try:
            response = json_response(await answer.collect())
        finally:
            answer.leave()
    if answer.is_replay:
        response.headers[REPLAYED] = "true"
    return response


def retry_identity(key: str | None, expected_version: int | None, digest: str) -> str | None:
    """What a retry of the request brings again: the client's key, or the same request on the same version."""
    if key is not None:
        if not IDEMPOTENCY_KEY.fullmatch(key):
            raise InvalidRequest(
                f"Idempotency-Key must be 1 to 255 printable ASCII characters without spaces, got {shown(key)}",
                param="Idempotency-Key",
            )
        return f"key:{key}"
    return None if expected_version is None else f"version:{expected_version}:{digest}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Read:
    """What a turn reads. `version`: at which it may be read (None: at any); the rest: see TurnRequest."""

    ids: tuple[int, ...]
    version: int | None
    after: LogPoint | None = None
    num_opening: int | None = None


async def _read_input(services: Services, key: SessionKey, body: GenerateBody) -> _Read:
    """Whether nothing at all may be read is known only with the session: an empty input passes here."""
    version = body.expected_version
    if body.messages is None:
        return _Read(ids=await read_input(services, body.input), version=version)
    head = await services.store.get(key)
    tokenizer, template = services.backend.tokenizer, services.chat_template
    answering = body.template_of_answer(template)
    messages = core_messages(body.messages, answering)
    chat = await turn_text_after(services.store, head, tokenizer, template, messages, answering=answering)
    ids = tuple(await services.prompts.encode(chat.text, param="messages"))
    return _Read(
        ids=ids,
        version=head.version if chat.is_bound and version is None else version,
        after=chat.after,
        num_opening=opening_of_turn(tokenizer, answering, ids),
    )


async def read_input(services: Services, given: str | list[int]) -> tuple[int, ...]:
    """The ids of an input, which may be empty. Raises InvalidRequest."""
    if isinstance(given, str):
        return tuple(await services.prompts.encode(given, param="input"))
    return services.prompts.verbatim(given, param="input").ids if given else ()
