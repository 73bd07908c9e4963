"""One request's events -> the deltas that its client sees."""

from __future__ import annotations

import codecs
import dataclasses
from collections import deque
from typing import NamedTuple

from nsm_core.engine.request import Event, Finished, PromptScored, PromptState, TokenEvent, TokenLogprob
from nsm_core.inspection.routing import TokenRouting
from nsm_core.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token with its log-probability, None where nothing was read before it, and its routing, if asked for.

    `raw`: its visible bytes, fewer than the token's where the text begins or ends inside it.
    """

    token_id: int
    raw: bytes
    logprob: TokenLogprob | None
    routing: TokenRouting | None = None


class Delta(NamedTuple):  # made for every token, in a fifth of the time that a frozen dataclass takes
    """What became visible. `tokens` are those whose logprobs and routing belong to this piece or were waiting for a
    piece to join.

    `prompt`: set on the one delta that carries the scored prompt. `finished`: set on the last one, which has no text.
    """

    text: str = ""
    tokens: tuple[ScoredToken, ...] = ()
    prompt: tuple[TokenLogprob | None, ...] | None = None
    finished: Finished | None = None

    @property
    def is_empty(self) -> bool:
        return not self.text and not self.tokens and self.prompt is None and self.finished is None


class DeltaBuilder:
    """Feeds on the events of one request, in order; joined, the texts are the whole visible text.

    A token joins a piece with its logprobs when all of its own text is visible. Until then it waits here. A stop string
    that begins inside it leaves it the bytes before, and one that begins before it removes it. So the bytes of all
    tokens, joined, are those of the text.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_chars = 0  # of all tokens so far, visible or not
        self._num_visible = 0  # characters
        self._waiting: deque[tuple[ScoredToken, int]] = deque()  # with the number of characters that ends the token
        self._num_events = 0
        self._num_shown = 0

    def feed(self, event: Event) -> tuple[Delta, ...]:
        """The deltas this event gives, often one, sometimes none."""
        if isinstance(event, PromptScored):
            return (Delta(prompt=event.logprobs),)
        if isinstance(event, TokenEvent):
            return self._feed_token(event)
        if isinstance(event, PromptState):
            return ()
        return self._feed_end(event)

    def _feed_token(self, event: TokenEvent) -> tuple[Delta, ...]:
        self._num_events += 1
        if event.logprob is not None or event.routing is not None:
            raw = self._tokenizer.token_bytes(event.token_id)
            token = ScoredToken(event.token_id, raw, event.logprob, event.routing)
            self._waiting.append((token, self._end_of(raw)))
        if not event.text:
            return ()
        self._num_visible += len(event.text)
        if not self._waiting:
            return (Delta(event.text),)
        num_whole = sum(1 for _, end in self._waiting if end <= self._num_visible)
        return (Delta(text=event.text, tokens=self._take(num_whole)),)

    def _end_of(self, raw: bytes) -> int:
        """How many characters must be visible for this token to be; a character that it only begins counts."""
        self._num_chars += len(self._utf8.decode(raw))
        has_begun_another = self._utf8.getstate()[0] != b""
        return self._num_chars + has_begun_another

    def _feed_end(self, event: Finished) -> tuple[Delta, ...]:
        num_visible = max(0, self._num_events - event.num_dropped_tokens - self._num_shown)
        tokens = self._take(min(num_visible, len(self._waiting)))
        if event.tail and self._waiting:
            tokens += (dataclasses.replace(self._waiting.popleft()[0], raw=event.tail),)
        rest = Delta(text=event.text, tokens=tokens)
        last = Delta(finished=event)
        return (last,) if rest.is_empty else (rest, last)

    def _take(self, count: int) -> tuple[ScoredToken, ...]:
        self._num_shown += count
        return tuple(self._waiting.popleft()[0] for _ in range(count))
