"""How many tokens a second this server reads, as its turns show."""

from __future__ import annotations

from nsm_core.engine.request import Finished

MIN_TOKENS = 64  # of a reading that is measured: of shorter ones the fixed cost of a step is most
WEIGHT = 0.2  # of the newest reading in the mean


class ReadingSpeed:
    """A moving mean, which begins with the first reading. `tokens_per_s`: until then. `is_single`: of tokens that are
    read one by one, which takes as long as to sample them.
    """

    def __init__(self, tokens_per_s: float, *, is_single: bool = False) -> None:
        self.tokens_per_s = tokens_per_s
        self._is_single = is_single
        self._is_measured = False

    def observe(self, finished: Finished) -> None:
        """The end of a request; one that read little tells nothing."""
        timings = finished.timings
        if timings is None:
            return
        if self._is_single:
            number, seconds = finished.completion_tokens, timings.decode_s
        else:
            number, seconds = finished.prompt_tokens - finished.cached_tokens, timings.prefill_s or 0.0
        if seconds and number >= MIN_TOKENS:
            weight = WEIGHT if self._is_measured else 1.0
            self._is_measured = True
            self.tokens_per_s += weight * (number / seconds - self.tokens_per_s)
