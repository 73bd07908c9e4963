"""Server-sent events out of bytes, as they come from a socket."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

DONE = "[DONE]"


@dataclasses.dataclass(frozen=True, slots=True)
class Event:
    """One event. `event_id`: of its `id:` line, "" without one. `data`: the text of its data lines."""

    event_id: str
    data: str

    @property
    def is_done(self) -> bool:
        """The end of a stream as OpenAI's interface marks it."""
        return self.data == DONE

    def json(self) -> dict[str, Any]:
        parsed: dict[str, Any] = json.loads(self.data)
        return parsed


class EventParser:
    """Feed it the received bytes; an event comes out with the blank line that ends it, wherever the reads were cut."""

    def __init__(self) -> None:
        self._rest = b""
        self._event_id = ""
        self._data: list[str] = []

    def feed(self, received: bytes) -> list[Event]:
        """The events that `received` completes."""
        *lines, self._rest = (self._rest + received).split(b"\n")
        events: list[Event] = []
        for line in lines:
            self._read_line(line.rstrip(b"\r").decode(), events)
        return events

    def _read_line(self, line: str, events: list[Event]) -> None:
        if not line:
            if self._data:
                events.append(Event(self._event_id, "\n".join(self._data)))
            self._event_id, self._data = "", []
            return
        name, _, value = line.partition(":")  # a comment has an empty name
        value = value.removeprefix(" ")
        if name == "data":
            self._data.append(value)
        elif name == "id":
            self._event_id = value
