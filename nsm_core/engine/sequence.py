"""One running request: what was asked, what was sampled, what is visible."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType

from nsm_core.engine.output import NO_IDS, OutputStream, Step
from nsm_core.engine.request import GenerationRequest, PromptState, Timings
from nsm_core.sampling.counts import TokenCounts
from nsm_core.sampling.device import pack_wishes
from nsm_core.sampling.result import TokenLogprob
from nsm_core.state.spec import State
from nsm_core.tokenizer import Tokenizer


@dataclasses.dataclass(slots=True)
class Timeline:
    """Readings of one clock, in seconds."""

    arrival: float
    admitted: float | None = None
    first_token: float | None = None

    def timings(self, now: float) -> Timings:
        """For a request that ends at `now`."""
        if self.admitted is None:
            return Timings(queue_s=now - self.arrival)
        queue_s = self.admitted - self.arrival
        if self.first_token is None:
            return Timings(queue_s=queue_s)
        return Timings(queue_s=queue_s, prefill_s=self.first_token - self.admitted, decode_s=now - self.first_token)


# A second copy is made only when the first is this many tokens old: copies are rare, and few tokens are read again.
MIN_SPACING_TOKENS = 64


@dataclasses.dataclass(frozen=True, slots=True)
class RewindPoint:
    """A state to go back to: the one after `num_fed` sampled tokens were fed on top of the prompt.

    `state` [1, *shape] has read `num_read` of them, fewer where drafts of tokens were taken back.
    """

    num_fed: int
    num_read: int
    state: State


class RewindPoints:
    """At most two copies: the one to go back to, and a younger one that takes its place when the held text moves on."""

    def __init__(self) -> None:
        self._points: list[RewindPoint] = []

    def update(self, *, num_fed: int, num_read: int, holding_since: int | None, copy: Callable[[], State]) -> None:
        """Called after each sampled token. `holding_since`: index (from 1) of the first token that may be taken back,
        None when none can; `copy` gives the state now, which has read `num_read` of `num_fed` sampled tokens.
        """
        if holding_since is None:
            self._points.clear()
            return
        if len(self._points) == 2 and self._points[1].num_fed < holding_since:
            del self._points[0]
        is_old = len(self._points) == 1 and num_fed - self._points[0].num_fed >= MIN_SPACING_TOKENS
        if is_old or not self._points:
            self._points.append(RewindPoint(num_fed, num_read, copy()))

    def is_copy_near(self, *, num_fed: int) -> bool:
        """Whether `update` may ask for a second copy within a few tokens."""
        return len(self._points) == 1 and num_fed - self._points[0].num_fed >= MIN_SPACING_TOKENS - 3

    def latest(self, *, num_kept: int) -> RewindPoint:
        """The youngest point with at most `num_kept` sampled tokens fed."""
        return next(point for point in reversed(self._points) if point.num_fed <= num_kept)


NO_COUNTS: Mapping[int, int] = MappingProxyType({})


class RunningSequence:
    """A request from the moment it is queued; its state lives in the slot of the pool that it gets later.

    It is a `SampledRow` as well: steps of hundreds of rows make no values of their own for the sampler.
    """

    def __init__(self, request: GenerationRequest, tokenizer: Tokenizer, arrival: float) -> None:
        """`arrival`: in seconds, by the clock that the timeline is kept by."""
        self.request = request
        self.params = request.sampling
        self.wishes = pack_wishes(request.sampling)
        self.timeline = Timeline(arrival)
        self.slot: int | None = None
        self.sampled: list[int] = []
        self.vocab_size = tokenizer.vocab_size
        self.num_in_flight = 0  # tokens whose sampling was launched, and whose ids are not known here yet
        self.num_fed_before_drafts: int | None = None  # set while the state is one from before refused drafts
        self.prompt_scores: list[TokenLogprob] = []
        self.prompt_states: list[PromptState] = []
        self.output = OutputStream(tokenizer, request.sampling)
        # Tokens before which its state may have to be kept, since text is held back from them on
        self.pausing_ids = self.output.holding_ids if self.may_be_taken_back else NO_IDS
        self.rewind_points = RewindPoints()
        # All tokens of context the request stands on, resumed ones included
        self.prompt_tokens = self.resumed_position + len(request.prompt_ids)
        # What penalties look at, and nobody else: an array as long as the vocabulary
        self._counts = TokenCounts(tokenizer.vocab_size, self.resumed_counts) if self.params.has_penalties else None
        is_plain = self._counts is None and not request.sampled_ids
        self._num_plain = self.params.max_tokens - 1 if is_plain else 0
        reread = _settled(request, tokenizer)
        for token_id in reread:
            self.take(token_id)
        self.read_ids = (*request.prompt_ids, *reread)  # what is read before the first token is sampled here

    @property
    def resumed_counts(self) -> Mapping[int, int]:
        """How often the session had sampled each token before this turn."""
        resume = self.request.resume
        return self.request.generated_counts if resume is None else resume.generated_counts

    @property
    def resumed_position(self) -> int:
        """Tokens fed before this request."""
        return 0 if self.request.resume is None else self.request.resume.position

    @property
    def position(self) -> int:
        """Absolute position of the next token to sample: the number of tokens fed before it."""
        return self.prompt_tokens + len(self.sampled) + self.num_in_flight

    @property
    def num_fed(self) -> int:
        """Sampled tokens that the state has read; between steps all but the last one, unless drafts were refused."""
        return len(self.sampled) - 1 if self.num_fed_before_drafts is None else self.num_fed_before_drafts

    @property
    def unread(self) -> list[int]:
        """Sampled tokens that the state has yet to read, oldest first."""
        return self.sampled[self.num_fed :]

    @property
    def generated_counts(self) -> Mapping[int, int]:
        """How often each token was sampled; empty where no penalty looks at it."""
        return NO_COUNTS if self._counts is None else self._counts

    @property
    def may_be_taken_back(self) -> bool:
        """Whether the state at the end may be older than the newest one: a stop string took tokens back."""
        return self.request.keep_state and bool(self.request.sampling.stop)

    def take_prompt_states(self) -> list[PromptState]:
        """Those kept since the last call."""
        kept, self.prompt_states = self.prompt_states, []
        return kept

    @property
    def given_id(self) -> int | None:
        """What the next token is to be, when it was sampled before, somewhere else."""
        num_sampled = len(self.sampled)
        return self.request.sampled_ids[num_sampled] if num_sampled < len(self.request.sampled_ids) else None

    def take_plain(self, token_id: int) -> str | None:
        """One more sampled token where it brings text and nothing else: the text. None, and nothing done, for all
        others: the first and the last, ids that end a text or hold it back, those of requests with penalties.
        """
        if not 0 < len(self.sampled) < self._num_plain:
            return None
        text = self.output.feed_plain(token_id)
        if text is not None:
            self.sampled.append(token_id)
        return text

    def take(self, token_id: int) -> Step:
        """One more sampled token."""
        self.sampled.append(token_id)
        if self._counts is not None:
            self._counts.add(token_id)
        return self.output.feed(token_id)


def _settled(request: GenerationRequest, tokenizer: Tokenizer) -> tuple[int, ...]:
    """The first of `sampled_ids`, which may be read like a prompt: no stop string can take any of them back.

    What follows, one token at least, is sampled again and comes out as given, so that stops, the state to go back to
    and the end are found as in a request that was never interrupted.
    """
    if not request.sampled_ids:
        return ()
    output, num_settled = OutputStream(tokenizer, request.sampling), 0
    for number, token_id in enumerate(request.sampled_ids[: request.sampling.max_tokens][:-1], start=1):
        step = output.feed(token_id)
        if step.stop is not None:
            break
        if step.holding_since is None:
            num_settled = number
    return request.sampled_ids[:num_settled]
