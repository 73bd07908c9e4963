"""Stored tokens -> the events that the engine gave for them."""

from __future__ import annotations

import dataclasses

from nsm_core.engine.output import OutputStream, StopMatch
from nsm_core.engine.request import Finished, TokenEvent
from nsm_core.sampling.params import SamplingParams
from nsm_core.tokenizer import Tokenizer
from service.turns.codec import StoredToken


class EventReplayer:
    """Feeds on a turn's tokens from the first one on: text depends on all that came before."""

    def __init__(self, tokenizer: Tokenizer, sampling: SamplingParams) -> None:
        self._output = OutputStream(tokenizer, sampling)
        self._stop: StopMatch | None = None
        self._last_text = ""
        self.num_tokens = 0

    def feed(self, token: StoredToken) -> TokenEvent:
        """Raises RuntimeError for a token after the one that stopped the turn."""
        step = self._output.feed(token.token_id)
        self.num_tokens += 1
        text = step.text
        if step.stop is not None:  # what the last token released comes with the end
            self._stop, self._last_text, text = step.stop, step.text, ""
        return TokenEvent(index=self.num_tokens, token_id=token.token_id, text=text, logprob=token.logprob)

    def finish(self, finished: Finished) -> Finished:
        """`finished` with the text that the end released."""
        stop = self._stop
        return dataclasses.replace(
            finished,
            text=self._last_text + self._output.finish(),
            stop_reason=None if stop is None else stop.reason,
            num_dropped_tokens=0 if stop is None else stop.num_dropped,
            tail=b"" if stop is None else stop.tail,
        )
