"""How many tokens a second this server reads, as its turns show."""

from __future__ import annotations

from nsm_core.engine.request import Finished

MIN_TOKENS = 64  # of a reading that is measured: of shorter ones the fixed cost of a step is most
WEIGHT = 0.2  # of the newest reading in the mean


class ReadingSpeed:
    """A moving mean. `tokens_per_s`: until something was read."""

    def __init__(self, tokens_per_s: float) -> None:
        self.tokens_per_s = tokens_per_s

    def observe(self, finished: Finished) -> None:
        """The end of a request; one that read little tells nothing."""
        num_read, timings = finished.prompt_tokens - finished.cached_tokens, finished.timings
        if timings is None or not timings.prefill_s or num_read < MIN_TOKENS:
            return
        self.tokens_per_s += WEIGHT * (num_read / timings.prefill_s - self.tokens_per_s)
