"""POST /v1/sessions/{id}/generate as a use case: a turn -> completion objects that also tell where the session is."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from typing import Any

from service.choices import ChoiceView
from service.completions import KIND, ChoiceText
from service.continuation import TurnRequest
from service.deps import Arrival, Services
from service.openai_format import Envelope, usage
from service.schemas.sessions import GenerateBody
from service.turn import Turn, TurnEnd


class SessionAnswer:
    """An admitted turn. Read `chunks` or `collect`, once; then, whatever happened, `leave`."""

    def __init__(self, turn: Turn, body: GenerateBody, view: ChoiceView, text: ChoiceText, envelope: Envelope) -> None:
        self._turn = turn
        self._view = view
        self._body = body
        self._text = text
        self._envelope = envelope

    def leave(self) -> None:
        """The turn goes on to its commit, so that the client can come back to it."""
        self._turn.detach()

    async def chunks(self) -> AsyncGenerator[dict[str, Any], None]:
        """The chunks of a completion; the one with the finish reason tells where the session is."""
        fields = {"usage": None} if self._body.has_usage_chunk else {}
        async with contextlib.aclosing(self._pieces()) as pieces:
            async for piece in pieces:
                is_last = piece["finish_reason"] is not None
                extra = {"session": self._session()} if is_last else {}
                yield self._envelope.wrap(KIND, [{"index": 0, **piece}], **fields, **extra)
                if piece["text"]:  # the consumer is back: the piece was handed to the connection
                    self._turn.delivered()
        if self._body.has_usage_chunk:
            yield self._envelope.wrap(KIND, [], usage=usage([self._end.finished]))

    async def collect(self) -> dict[str, Any]:
        """The whole answer as one object."""
        pieces: list[dict[str, Any]] = []
        async with contextlib.aclosing(self._pieces()) as parts:
            async for piece in parts:
                if piece["text"]:
                    self._turn.delivered()
                pieces.append(piece)
        choices = [{"index": 0, **self._text.join(pieces)}]
        return self._envelope.wrap(KIND, choices, usage=usage([self._end.finished]), session=self._session())

    async def _pieces(self) -> AsyncGenerator[dict[str, Any], None]:
        """Ends with the piece that has the finish reason; raises what kept the turn from being committed."""
        async with contextlib.aclosing(self._turn.events()) as events:
            async for event in events:
                if isinstance(event, TurnEnd) and event.error is not None:
                    raise event.error
                for delta in self._view.feed(event.finished if isinstance(event, TurnEnd) else event):
                    for piece in self._text.pieces(delta):
                        yield piece

    @property
    def _end(self) -> TurnEnd:
        if self._turn.end is None:
            raise RuntimeError("the turn has not ended")
        return self._turn.end

    def _session(self) -> dict[str, Any]:
        head = self._end.head
        session: dict[str, Any] = {"id": head.session_id, "version": head.version, "position": head.position}
        if self._turn.other_numerics is not None:
            session["taken_over_from"] = self._turn.other_numerics
        if self._turn.rebuilt is not None:
            session["rebuilt"] = self._turn.rebuilt
        return session


async def open_session_turn(
    services: Services, tenant: str, session_id: str, body: GenerateBody, arrival: Arrival
) -> SessionAnswer:
    """Checks everything and submits; raises what the client shall get as a status."""
    services.check_model(body.model)
    tokenizer = services.backend.tokenizer
    sampling = body.sampling(max_tokens_limit=services.settings.max_tokens_limit, vocab_size=tokenizer.vocab_size)
    envelope = Envelope.new("cmpl", model=services.model_name, system_fingerprint=services.system_fingerprint)
    request = TurnRequest(
        request_id=envelope.id,
        tenant=tenant,
        session_id=session_id,
        input_ids=await _input_ids(services, body.input),
        is_verbatim=not isinstance(body.input, str),
        sampling=sampling,
        has_own_seed=body.seed is not None,
        expected_version=body.expected_version,
        arrival=arrival.time,
        deadline=arrival.time + (body.timeout or services.settings.request_timeout_s),
    )
    turn = await services.turns.open_turn(request)
    services.metrics.body_accepted(n=1, max_tokens=body.max_tokens)
    text = ChoiceText(tokenizer, has_logprobs=body.logprobs is not None)
    return SessionAnswer(turn, body, ChoiceView(tokenizer), text, envelope)


async def _input_ids(services: Services, given: str | list[int]) -> tuple[int, ...]:
    """Whether nothing at all may be read is known only with the session: an empty input passes here."""
    if isinstance(given, str):
        return tuple(await services.prompts.encode(given, param="input"))
    return services.prompts.verbatim(given, param="input").ids if given else ()
