"""What the answers of completions and of chat have in common: a group of choices, as frames or as one object."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from nsm_core.engine.request import Finished
from service.generate.choices import RequestGroup, chunk_usage, ends_of
from service.generate.openai_format import Envelope, usage
from service.generate.starting import ReturnedState
from service.schemas.common import SamplingFields
from service.web.sse import DirectText, PartWriter, TextFrame, frame


class GroupAnswer:
    """An admitted body. Read `frames` or `collect`, once; then, whatever happened, `leave`.

    `choices_per_prompt`: those that `usage` counts. `chunk_kind`: the `object` of chunks.
    """

    def __init__(
        self,
        group: RequestGroup,
        body: SamplingFields,
        envelope: Envelope,
        returned: ReturnedState | None,
        *,
        choices_per_prompt: int,
        chunk_kind: str,
    ) -> None:
        self.group = group
        self._fields = body
        self._envelope = envelope
        self._returned = returned
        self._choices_per_prompt = choices_per_prompt
        self._chunk_kind = chunk_kind
        self._writer: PartWriter | None = None

    def attach(self, writer: PartWriter) -> None:
        self._writer = writer

    def leave(self) -> None:
        self.group.cancel()

    def _show_directly(self, text: TextFrame) -> None:
        """Text goes to the connection without a task's turn, where the connection takes it so."""
        if self._writer is not None:
            self.group.show_by(DirectText(self._writer, text, is_event_per_token=self._fields.is_event_per_token))

    async def _frames_without_choices(self) -> AsyncGenerator[bytes, None]:
        """At the end of a stream: the state, then the usage, if they were asked for. Nothing else holds the state while
        its frame waits for the client.
        """
        has_usage = self._fields.has_usage_chunk
        if self._returned is not None:
            extra = {"usage": None} if has_usage else {}
            yield frame(self._envelope.wrap(self._chunk_kind, [], **await self._state_field(), **extra))
        if has_usage:
            yield frame(self._envelope.wrap(self._chunk_kind, [], usage=self._usage(ends_of(self.group))))

    async def _state_field(self) -> dict[str, Any]:
        """The returned state, if it was asked for."""
        return {} if self._returned is None else {"state": await self._returned.object(self.group.take_end_state())}

    def _usage(self, ends: list[Finished]) -> dict[str, Any]:
        return usage(ends, choices_per_prompt=self._choices_per_prompt, has_energy=self._fields.include_energy)

    def _chunk_usage(self) -> dict[str, Any]:
        return chunk_usage(self._fields, self.group, choices_per_prompt=self._choices_per_prompt)
