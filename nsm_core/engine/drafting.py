"""Guesses at the tokens that come next, from the text itself, and how many of them are worth a try. Plain Python."""

from __future__ import annotations

from collections.abc import Sequence

# Tokens that must have occurred before, in this order. What follows fewer is a guess that fails too often in texts that
# do not repeat themselves; in those that do, longer ones find nothing else, later.
GRAM_LENGTH = 4
# Of the text, the last so many tokens are looked through, up to twice as many: it bounds memory (a megabyte a text).
WINDOW_TOKENS = 2048

MIN_DRAFTS, MAX_DRAFTS = 2, 8  # at a time
FIRST_SHARE = 0.5  # of drafts that are taken to come true, before any has
NEW_SHARE = 0.25  # what the newest drafts count in it
WORTH_SHARE = 0.3  # below it drafts cost more than they give; on a CPU a token more in a step costs an eighth of one
AGAIN_SHARE = 0.4  # after a pause: one failure ends the next try
GOOD_SHARE = 0.6
MIN_PAUSE_TOKENS, MAX_PAUSE_TOKENS = 32, 512


class NgramDrafter:
    """What followed the last few tokens when they last occurred. Its drafts depend on the ids it was given alone."""

    def __init__(self) -> None:
        self._ids: list[int] = []
        self._followed: dict[tuple[int, ...], int] = {}  # by gram: index of the token after its last occurrence

    def extend(self, ids: Sequence[int]) -> None:
        """The text goes on with these; of very many only the last count."""
        for token_id in ids[-WINDOW_TOKENS:]:
            self._note_end()
            self._ids.append(token_id)
        if len(self._ids) > 2 * WINDOW_TOKENS:
            self._forget_old()

    def propose(self, num_tokens: int) -> list[int]:
        """So many tokens that may come next, or none. A gram that overlaps what followed it goes on for ever."""
        start = self._followed.get(tuple(self._ids[-GRAM_LENGTH:]))
        if start is None:
            return []
        drafts = self._ids[start : start + num_tokens]
        period = len(drafts)  # shorter than asked for: the text ended, and so it repeats
        return [drafts[index % period] for index in range(num_tokens)]

    def _note_end(self) -> None:
        """What comes now follows the gram at the end of the text."""
        if len(self._ids) >= GRAM_LENGTH:
            self._followed[tuple(self._ids[-GRAM_LENGTH:])] = len(self._ids)

    def _forget_old(self) -> None:
        kept, self._ids, self._followed = self._ids[-WINDOW_TOKENS:], [], {}
        self.extend(kept)


class DraftPace:
    """How many tokens to draft for one text: more while they come true, none for a while where they do not.

    Pauses double, so that a text which never repeats itself pays for few drafts.
    """

    def __init__(self) -> None:
        self._num_drafts = MIN_DRAFTS
        self._share = FIRST_SHARE
        self._pause = MIN_PAUSE_TOKENS
        self._paused_until = 0

    def num_drafts(self, num_sampled: int) -> int:
        """For a text of `num_sampled` tokens; 0 in a pause."""
        return 0 if num_sampled < self._paused_until else self._num_drafts

    def tell(self, *, num_drafted: int, num_accepted: int, num_sampled: int) -> None:
        """How the last drafts went; the text has `num_sampled` tokens now."""
        self._share += NEW_SHARE * (num_accepted / num_drafted - self._share)
        grown = 2 * self._num_drafts if num_accepted == num_drafted else num_accepted
        self._num_drafts = min(MAX_DRAFTS, max(MIN_DRAFTS, grown))
        if self._share < WORTH_SHARE:
            self._paused_until = num_sampled + self._pause
            self._pause = min(MAX_PAUSE_TOKENS, 2 * self._pause)
            self._share = AGAIN_SHARE
        elif self._share > GOOD_SHARE:
            self._pause = MIN_PAUSE_TOKENS
