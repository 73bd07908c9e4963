"""From sampled tokens to visible text: byte-safe decoding, stop strings, stop ids and end of text."""

from __future__ import annotations

import dataclasses
import functools
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from nsm_core.sampling.params import SamplingParams
from nsm_core.sampling.result import NOT_FINITE
from nsm_core.tokenizer import IncrementalDecoder, Tokenizer

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


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StopMatch:
    """Why and where the output ended.

    `reason`: the stop string or stop id, None for end of text. `num_dropped`: how many of the last tokens are wholly or
    partly inside the match or after it, and so are not kept. `tail`: the visible bytes of the first dropped token, when
    the match begins inside it. The bytes of the kept tokens followed by `tail` are exactly the visible text; `tail` may
    begin or end inside a character, so it is bytes (`Tokenizer.encode_bytes` makes ids of it).
    """

    reason: str | int | None
    num_dropped: int
    tail: bytes = b""


NO_IDS: frozenset[int] = frozenset()
NO_STOPS = StopStrings(())


class Step(NamedTuple):
    """What one token brought.

    `text`: newly visible. `stop`: set when the output ends here; then `text` is the last of it. `holding_since`: index
    (the first token fed is 1) of the first token with text that is held back because it may begin a stop string; None
    when nothing is held. It never falls, and whoever needs the state before a possible match needs the one before this
    token was fed to the model.
    """

    text: str
    stop: StopMatch | None = None
    holding_since: int | None = None


@functools.lru_cache(maxsize=64)
def _shared(ids: frozenset[int]) -> frozenset[int]:
    """One value for equal ones: hundreds of requests then look into the same memory."""
    return ids


@dataclasses.dataclass(frozen=True, slots=True)
class _Piece:
    """The bytes of a token that may yet be cut: `start` is where they begin in the whole output."""

    index: int
    start: int
    raw: bytes


class OutputStream:
    """The visible output of one request, token by token.

    The texts of all steps and of `finish`, joined, are the decoded kept tokens and tail: nothing of a matched stop
    string ever shows, and what was held back in vain is released. The stop string that ends first wins, so the result
    depends neither on where tokens end nor on what comes later; of two that end together, the one that began first.
    Stop strings match the bytes that tokens stand for: U+FFFD matches itself, not a bad byte shown as U+FFFD.

    Work and memory per token depend on the token's length and the longest stop string, never on the output so far.
    `max_tokens` is not looked at here.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self._tokenizer = tokenizer
        self._decoder = IncrementalDecoder(tokenizer)
        self._stops = StopStrings(params.stop) if params.stop else NO_STOPS
        self._has_stops = bool(params.stop)
        self._stop_ids = frozenset(params.stop_token_ids)
        end_ids = () if params.ignore_eos else (tokenizer.end_of_text_id,)
        self.end_ids = self._stop_ids.union(end_ids)
        # Tokens with which text may begin to be held back, or a stop string be found whole
        self.holding_ids = tokenizer.ids_with(self._stops.starts) if params.stop else NO_IDS
        self._not_plain = _shared(self.end_ids | {NOT_FINITE})
        self._place = 0
        self._num_tokens = 0
        self._num_bytes = 0  # of all tokens so far
        self._held = b""  # the last bytes, not visible yet
        self._pieces: deque[_Piece] = deque()  # the tokens that hold them, oldest first
        self._is_finished = False

    def feed(self, token_id: int) -> Step:
        """The next sampled token. Raises RuntimeError after the end."""
        if self._is_finished:
            raise RuntimeError("the output has ended")
        self._num_tokens += 1
        if token_id in self.end_ids:
            return self._end(StopMatch(reason=token_id if token_id in self._stop_ids else None, num_dropped=1))
        return self._feed_bytes(self._tokenizer.token_bytes(token_id))

    def feed_plain(self, token_id: int) -> str | None:
        """`feed` of a token that does nothing but show its text, as most do: the text. None, and nothing done, where
        there may be more to it: the end, no token at all, text that is held back.
        """
        if token_id in self._not_plain or token_id in self.holding_ids or self._place != ROOT:
            return None
        self._num_tokens += 1
        if self._has_stops:
            self._num_bytes += len(self._tokenizer.token_bytes(token_id))
        return self._decoder.feed(token_id)

    def finish(self) -> str:
        """Ends an output that met no stop: text held back and an unfinished character. Empty after a stop."""
        if self._is_finished:
            return ""
        return self._end(None).text

    def _end(self, stop: StopMatch | None) -> Step:
        self._is_finished = True
        text = self._decoder.feed_bytes(self._held) + self._decoder.flush()
        self._held = b""
        return Step(text=text, stop=stop)

    def _feed_bytes(self, raw: bytes) -> Step:
        if not self._has_stops:  # then nothing is ever held back
            return Step(text=self._decoder.feed_bytes(raw))
        if self._place == ROOT and self._stops.starts.isdisjoint(raw):  # nothing is held, and nothing will be
            self._num_bytes += len(raw)
            return Step(text=self._decoder.feed_bytes(raw))
        if raw:
            self._pieces.append(_Piece(index=self._num_tokens, start=self._num_bytes, raw=raw))
        for offset, byte in enumerate(raw):
            self._place = self._stops.advance(self._place, byte)
            stop = self._stops.match(self._place)
            if stop is not None:
                return self._cut(stop, self._num_bytes + offset + 1 - len(stop.encode("utf-8")))
        self._num_bytes += len(raw)
        return self._release(self._held + raw)

    def _release(self, waiting: bytes) -> Step:
        """Shows what cannot belong to a stop string any more."""
        visible = len(waiting) - self._stops.num_held(self._place)
        self._held = waiting[visible:]
        self._drop_pieces_before(self._num_bytes - len(self._held))
        holding_since = self._pieces[0].index if self._pieces else None
        return Step(text=self._decoder.feed_bytes(waiting[:visible]), holding_since=holding_since)

    def _cut(self, stop: str, match_start: int) -> Step:
        """The output ends at byte `match_start` of all."""
        waiting_start = self._num_bytes - len(self._held)
        waiting = self._held + self._pieces[-1].raw
        self._held = waiting[: match_start - waiting_start]
        self._drop_pieces_before(match_start)
        first = self._pieces[0]
        tail = first.raw[: match_start - first.start]
        return self._end(StopMatch(reason=stop, num_dropped=self._num_tokens + 1 - first.index, tail=tail))

    def _drop_pieces_before(self, start: int) -> None:
        while self._pieces and self._pieces[0].start + len(self._pieces[0].raw) <= start:
            self._pieces.popleft()
