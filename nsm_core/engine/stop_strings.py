"""Finds stop strings in a stream of bytes, one byte at a time (an Aho-Corasick automaton)."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

ROOT = 0


class StopStrings:
    """The automaton over the stop strings' UTF-8 bytes. Immutable; a place in it is a plain int, ROOT at the start.

    Bytes and not characters, because tokens end inside characters. UTF-8 finds its own borders again, so a stop
    string's bytes match where its characters do.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._next: list[dict[int, int]] = [{}]
        self._depth: list[int] = [0]
        self._match: list[str | None] = [None]
        for stop in stops:
            self._add(stop)
        self.starts = frozenset(self._next[ROOT])  # bytes that lead away from ROOT
        self._fallback: list[int] = [ROOT] * len(self._next)
        self._link()

    def advance(self, place: int, byte: int) -> int:
        """The place after one more byte. Amortised constant time."""
        while byte not in self._next[place]:
            if place == ROOT:
                return ROOT
            place = self._fallback[place]
        return self._next[place][byte]

    def num_held(self, place: int) -> int:
        """How many of the last bytes may yet become a stop string: the longest suffix that begins one."""
        return self._depth[place]

    def match(self, place: int) -> str | None:
        """The stop string that ends at this place; the longest one, i.e. the one that began first."""
        return self._match[place]

    def _add(self, stop: str) -> None:
        place = ROOT
        for byte in stop.encode("utf-8"):
            if byte not in self._next[place]:
                self._next[place][byte] = len(self._next)
                self._next.append({})
                self._depth.append(self._depth[place] + 1)
                self._match.append(None)
            place = self._next[place][byte]
        self._match[place] = stop

    def _link(self) -> None:
        """Breadth first: `fallback` is the place of the longest proper suffix that begins a stop string."""
        places = deque(self._next[ROOT].values())
        while places:
            place = places.popleft()
            for byte, child in self._next[place].items():
                self._fallback[child] = self.advance(self._fallback[place], byte)
                if self._match[child] is None:
                    self._match[child] = self._match[self._fallback[child]]
                places.append(child)
