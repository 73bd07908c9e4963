"""The text of a request whose engine sends token ids without text."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from nsm_core.engine.output import OutputStream
from nsm_core.engine.request import Event, Finished, GenerationRequest, TokenEvent
from nsm_core.tokenizer import Tokenizer


class TokenText:
    """Makes the events that the engine would have made; for a request that `has_free_text`."""

    __slots__ = ("_num_tokens", "_output", "_rest")

    def __init__(self, tokenizer: Tokenizer, request: GenerationRequest) -> None:
        self._output = OutputStream(tokenizer, request.sampling)
        self._num_tokens = 0
        self._rest = ""  # what the token that stops has released; it comes with the end

    def texts(self, ids: Sequence[int]) -> list[str]:
        """Of the next tokens, one each."""
        self._num_tokens += len(ids)
        if len(ids) == 1:
            text = self._output.feed_plain(ids[0])
            return [self._text(ids[0]) if text is None else text]
        return [self._text(token_id) for token_id in ids]

    def events(self, ids: Sequence[int], texts: Sequence[str]) -> list[Event]:
        """Of the tokens of the last call of `texts`."""
        first = self._num_tokens - len(ids) + 1
        reported = zip(ids, texts, strict=True)
        return [
            TokenEvent(index=first + at, token_id=token_id, text=text) for at, (token_id, text) in enumerate(reported)
        ]

    def event_of(self, reported: Event | int) -> Event:
        """An event that the engine reported, or a plain token by its id, with its text."""
        if isinstance(reported, int):
            self._num_tokens += 1
            return TokenEvent(index=self._num_tokens, token_id=reported, text=self._text(reported))
        if isinstance(reported, TokenEvent):
            (text,) = self.texts((reported.token_id,))
            return TokenEvent(
                index=reported.index,
                token_id=reported.token_id,
                text=text,
                logprob=reported.logprob,
                routing=reported.routing,
            )
        if isinstance(reported, Finished):
            text = self._rest + self._output.finish()
            return dataclasses.replace(reported, text=text) if text != reported.text else reported
        return reported

    def _text(self, token_id: int) -> str:
        text = self._output.feed_plain(token_id)
        if text is not None:
            return text
        step = self._output.feed(token_id)
        if step.stop is None:
            return step.text
        self._rest = step.text
        return ""
