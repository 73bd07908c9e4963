"""One request's events -> what a client may see of them, piece by piece."""

from __future__ import annotations

import dataclasses

from nsm_core.engine.request import Event, Finished, PromptScored, TokenEvent, TokenLogprob


@dataclasses.dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token with its log-probability; None where nothing was read before it."""

    token_id: int
    logprob: TokenLogprob | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """What became visible. `tokens` are those whose logprobs belong to this piece or were waiting for a piece to join.

    `prompt`: set on the one delta that carries the scored prompt. `finished`: set on the last one, which has no text.
    """

    text: str = ""
    tokens: tuple[ScoredToken, ...] = ()
    prompt: tuple[TokenLogprob | None, ...] | None = None
    finished: Finished | None = None

    @property
    def is_empty(self) -> bool:
        return not self.text and not self.tokens and self.prompt is None and self.finished is None


class ChoiceView:
    """Feeds on the events of one request, in order; joined, the texts are the whole visible text.

    Tokens whose text is held back wait here with their logprobs: they join the next piece, or vanish when a stop string
    or stop id swallowed them.
    """

    def __init__(self) -> None:
        self._waiting: list[ScoredToken] = []
        self._num_events = 0
        self._num_shown = 0

    def feed(self, event: Event) -> tuple[Delta, ...]:
        """The deltas this event gives, often one, sometimes none."""
        if isinstance(event, PromptScored):
            return (Delta(prompt=event.logprobs),)
        if isinstance(event, TokenEvent):
            return self._feed_token(event)
        return self._feed_end(event)

    def _feed_token(self, event: TokenEvent) -> tuple[Delta, ...]:
        self._num_events += 1
        if event.logprob is not None:
            self._waiting.append(ScoredToken(event.token_id, event.logprob))
        if not event.text:
            return ()
        return (Delta(text=event.text, tokens=self._take(len(self._waiting))),)

    def _feed_end(self, event: Finished) -> tuple[Delta, ...]:
        num_kept = max(0, self._num_events - event.num_dropped_tokens - self._num_shown)
        rest = Delta(text=event.text, tokens=self._take(min(num_kept, len(self._waiting))))
        last = Delta(finished=event)
        return (last,) if rest.is_empty else (rest, last)

    def _take(self, count: int) -> tuple[ScoredToken, ...]:
        taken = tuple(self._waiting[:count])
        del self._waiting[:count]
        self._num_shown += len(taken)
        return taken
