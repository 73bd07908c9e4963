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
    """An Aho-Corasick automaton over the stop strings' UTF-8 bytes. Immutable; its nodes are ints, ROOT is the start.

    It works on bytes, because tokens end inside characters. UTF-8 is self-synchronising: a stop string's bytes match
    exactly where its characters do.
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

    def advance(self, node: int, byte: int) -> int:
        """The node after one more byte. Amortised constant time."""
        while byte not in self._next[node]:
            if node == ROOT:
                return ROOT
            node = self._fallback[node]
        return self._next[node][byte]

    def num_held(self, node: int) -> int:
        """The number of last bytes that may become a stop string: the longest suffix that begins one."""
        return self._depth[node]

    def match(self, node: int) -> str | None:
        """The stop string that ends at this node: the longest, so the one that began first."""
        return self._match[node]

    def _add(self, stop: str) -> None:
        node = ROOT
        for byte in stop.encode("utf-8"):
            if byte not in self._next[node]:
                self._next[node][byte] = len(self._next)
                self._next.append({})
                self._depth.append(self._depth[node] + 1)
                self._match.append(None)
            node = self._next[node][byte]
        self._match[node] = stop

    def _link(self) -> None:
        """Breadth first: `fallback` is the node of the longest proper suffix that begins a stop string."""
        nodes = deque(self._next[ROOT].values())
        while nodes:
            node = nodes.popleft()
            for byte, child in self._next[node].items():
                self._fallback[child] = self.advance(self._fallback[node], byte)
                if self._match[child] is None:
                    self._match[child] = self._match[self._fallback[child]]
                nodes.append(child)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StopMatch:
    """The reason and the position of the output's end.

    `reason`: the stop string or stop id, None for end of text. `num_dropped`: the number of last tokens that lie wholly
    or partly inside the match or after it; they are dropped. `tail`: the visible bytes of the first dropped token, if
    the match begins inside it. The bytes of the other tokens followed by `tail` are exactly the visible text. `tail`
    may begin or end inside a character, so it is bytes (`Tokenizer.encode_bytes` turns it into ids).
    """

    reason: str | int | None
    num_dropped: int
    tail: bytes = b""


NO_IDS: frozenset[int] = frozenset()
NO_STOPS = StopStrings(())


class OutputStep(NamedTuple):
    """The effect of one token on the output.

    `text`: newly visible text. `stop`: set when the output ends here; then `text` is the last of it. `holding_since`:
    index (the first token is 1) of the first token whose text is held back because it may begin a stop string; None
    when no text is held. It never falls. The state before a possible match is the one before this token was fed to the
    model.
    """

    text: str
    stop: StopMatch | None = None
    holding_since: int | None = None


@functools.lru_cache(maxsize=64)
def _shared(ids: frozenset[int]) -> frozenset[int]:
    """One object for equal sets: hundreds of requests then share memory and cache."""
    return ids


@dataclasses.dataclass(frozen=True, slots=True)
class _HeldToken:
    """A token whose bytes may still be cut. `start`: the offset of its first byte in the whole output."""

    index: int
    start: int
    raw: bytes


class _NoText:
    """In place of a decoder."""

    __slots__ = ()

    def feed(self, token_id: int) -> str:
        return ""

    def feed_bytes(self, raw: bytes) -> str:
        return ""

    def flush(self) -> str:
        return ""


class OutputStream:
    """The visible output of one request, token by token.

    The texts of all steps and of `finish`, joined, are the decoded tokens up to the stop and its tail: no part of a
    matched stop string ever shows, and text held back without a match is released. The stop string that ends first
    wins; of two that end together, the one that began first. So the result depends neither on token boundaries nor on
    later tokens. Stop strings match the bytes of tokens: U+FFFD matches itself, not a bad byte shown as U+FFFD.

    Work and memory per token depend on the token's length and the longest stop string, never on the output so far.
    `max_tokens` is not applied here.
    """

    __slots__ = (
        *("_decoder", "_has_stops", "_held", "_held_tokens", "_is_finished", "_node", "_num_bytes", "_num_tokens"),
        *("_stop_ids", "_stops", "_tokenizer", "end_ids", "holding_ids", "special_ids"),
    )

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, *, has_text: bool = True) -> None:
        """`has_text`: False if only the end matters; then no step has text. Not with stop strings."""
        if params.stop and not has_text:
            raise ValueError("stop strings are found in text")
        self._tokenizer = tokenizer
        self._decoder = IncrementalDecoder(tokenizer) if has_text else _NoText()
        self._stops = StopStrings(params.stop) if params.stop else NO_STOPS
        self._has_stops = bool(params.stop)
        self._stop_ids = frozenset(params.stop_token_ids)
        end_ids = () if params.ignore_eos else (tokenizer.end_of_text_id,)
        self.end_ids = self._stop_ids.union(end_ids)
        # Tokens after which text may be held back, or that hold a whole stop string
        self.holding_ids = tokenizer.ids_with(self._stops.starts) if params.stop else NO_IDS
        # Tokens that may end the output or hold text back: all others only add text
        self.special_ids = _shared(self.end_ids | self.holding_ids | {NOT_FINITE})
        self._node = 0
        self._num_tokens = 0
        self._num_bytes = 0  # of all tokens so far
        self._held = b""  # the last bytes, not yet visible
        self._held_tokens: deque[_HeldToken] = deque()  # the tokens of these bytes, oldest first
        self._is_finished = False

    @property
    def is_holding(self) -> bool:
        """Whether text is held back, so that the next token may end the output whatever it is."""
        return self._node != ROOT

    def feed(self, token_id: int) -> OutputStep:
        """The next sampled token. Raises RuntimeError after the end."""
        if self._is_finished:
            raise RuntimeError("the output has ended")
        self._num_tokens += 1
        if token_id in self.end_ids:
            return self._end(StopMatch(reason=token_id if token_id in self._stop_ids else None, num_dropped=1))
        return self._feed_bytes(self._tokenizer.token_bytes(token_id))

    def feed_plain(self, token_id: int) -> str | None:
        """`feed` for a token that only adds text, as most do: the text. None, without any change, for tokens that may
        end the output or hold text back, and for NOT_FINITE.
        """
        if token_id in self.special_ids or self._node != ROOT:
            return None
        self._num_tokens += 1
        if self._has_stops:
            self._num_bytes += len(self._tokenizer.token_bytes(token_id))
        return self._decoder.feed(token_id)

    def finish(self) -> str:
        """Ends an output without a stop: releases held text and an unfinished character. Empty after a stop."""
        if self._is_finished:
            return ""
        return self._end(None).text

    def _end(self, stop: StopMatch | None) -> OutputStep:
        self._is_finished = True
        text = self._decoder.feed_bytes(self._held) + self._decoder.flush()
        self._held = b""
        return OutputStep(text=text, stop=stop)

    def _feed_bytes(self, raw: bytes) -> OutputStep:
        if not self._has_stops:  # no text is ever held back
            return OutputStep(text=self._decoder.feed_bytes(raw))
        if self._node == ROOT and self._stops.starts.isdisjoint(raw):  # no text is held, and none will be
            self._num_bytes += len(raw)
            return OutputStep(text=self._decoder.feed_bytes(raw))
        if raw:
            self._held_tokens.append(_HeldToken(index=self._num_tokens, start=self._num_bytes, raw=raw))
        for offset, byte in enumerate(raw):
            self._node = self._stops.advance(self._node, byte)
            stop = self._stops.match(self._node)
            if stop is not None:
                return self._cut(stop, self._num_bytes + offset + 1 - len(stop.encode("utf-8")))
        self._num_bytes += len(raw)
        return self._release(self._held + raw)

    def _release(self, waiting: bytes) -> OutputStep:
        """Shows the bytes that can no longer belong to a stop string."""
        visible = len(waiting) - self._stops.num_held(self._node)
        self._held = waiting[visible:]
        self._drop_held_before(self._num_bytes - len(self._held))
        holding_since = self._held_tokens[0].index if self._held_tokens else None
        return OutputStep(text=self._decoder.feed_bytes(waiting[:visible]), holding_since=holding_since)

    def _cut(self, stop: str, match_start: int) -> OutputStep:
        """Ends the output at byte `match_start` of the whole output."""
        waiting_start = self._num_bytes - len(self._held)
        waiting = self._held + self._held_tokens[-1].raw
        self._held = waiting[: match_start - waiting_start]
        self._drop_held_before(match_start)
        first = self._held_tokens[0]
        tail = first.raw[: match_start - first.start]
        return self._end(StopMatch(reason=stop, num_dropped=self._num_tokens + 1 - first.index, tail=tail))

    def _drop_held_before(self, start: int) -> None:
        while self._held_tokens and self._held_tokens[0].start + len(self._held_tokens[0].raw) <= start:
            self._held_tokens.popleft()
