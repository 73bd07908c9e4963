"""One running request: its parameters, sampled tokens, visible output and rewind points."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType

from nsm_core.engine.held_states import HeldStart
from nsm_core.engine.output import NO_IDS, OutputStep, OutputStream
from nsm_core.engine.request import GenerationRequest, PromptState, Timings
from nsm_core.engine.token_rows import TokenRows
from nsm_core.grammars.matcher import TokenMatcher
from nsm_core.sampling.counts import TokenCounts
from nsm_core.sampling.device import pack_sampling_params
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
NO_COUNTS: Mapping[int, int] = MappingProxyType({})


@dataclasses.dataclass(frozen=True, slots=True)
class RewindPoint:
    """A state to rewind to: the one after `num_fed` sampled tokens were fed on top of the prompt.

    `state` [1, *shape] has read `num_read` of them, fewer after a rollback of drafts.
    """

    num_fed: int
    num_read: int
    state: State


class RewindPoints:
    """At most two copies of a state: the rewind target, and a younger one that replaces it when the held text moves."""

    def __init__(self) -> None:
        self._points: list[RewindPoint] = []

    def update(self, *, num_fed: int, num_read: int, holding_since: int | None, copy: Callable[[], State]) -> None:
        """After each sampled token. `holding_since`: index (from 1) of the first token that may be dropped, None if
        there is none. `copy` returns the current state, which has read `num_read` of `num_fed` sampled tokens.
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
        """Whether `update` may make a second copy within a few tokens."""
        return len(self._points) == 1 and num_fed - self._points[0].num_fed >= MIN_SPACING_TOKENS - 3

    def latest(self, *, num_visible: int) -> RewindPoint:
        """The youngest point with at most `num_visible` sampled tokens fed."""
        return next(point for point in reversed(self._points) if point.num_fed <= num_visible)


class RunningSequence:
    """A request from the moment it is queued. Its state lies in the pool, in the slot that it gets later.

    It is also the sampler's `SampledRow`, so steps of hundreds of rows create no values for the sampler.
    """

    def __init__(
        self,
        request: GenerationRequest,
        tokenizer: Tokenizer,
        arrival: float,
        matcher: TokenMatcher | None = None,
        tag: int | None = None,
    ) -> None:
        """`arrival`: in seconds, by the clock of the timeline. `matcher`: of the request's grammar, at its start.
        `tag`: of a request whose reader makes the text, if it `has_plain_tokens`.

        Raises GrammarFailed when `sampled_ids` are not of the grammar.
        """
        if (matcher is None) != (request.sampling.grammar is None):
            raise ValueError("a request has a matcher if and only if it has a grammar")
        self.request = request
        self.matcher = matcher
        self.params = request.sampling
        self.packed_params = pack_sampling_params(request.sampling)
        self.timeline = Timeline(arrival)
        self.slot: int | None = None
        self.tag = tag
        self._sampled: list[int] = []
        self._rows: TokenRows | None = None  # they have tokens of this request,
        self._row = 0  # in this row
        self.vocab_size = tokenizer.vocab_size
        self.num_fed_before_drafts: int | None = None  # set after a rollback: the state is older than the text
        self.prompt_scores: list[TokenLogprob] = []
        self.prompt_states: list[PromptState] = []
        self.shared_start: State | None = None  # of another request with the same prompt, until the slot has it
        self.held_start: HeldStart | None = None  # the same of a state that the engine holds
        self.num_shared = 0  # prompt tokens in it that this request need not read
        self.output = OutputStream(tokenizer, request.sampling, has_text=tag is None or not request.has_free_text)
        # Text is held back from these tokens on, so the state before them may be needed
        self.pausing_ids = self.output.holding_ids if self.may_rewind else NO_IDS
        self.rewind_points = RewindPoints()
        # All tokens of context, resumed ones included
        self.prompt_tokens = self.resumed_position + len(request.prompt_ids)
        # An array as long as the vocabulary, so only for requests with penalties
        self._counts = TokenCounts(tokenizer.vocab_size, self.resumed_counts) if self.params.has_penalties else None
        is_plain = self._counts is None and not request.sampled_ids
        self._num_plain = self.params.max_tokens - 1 if is_plain else 0
        replayed = _replayed_ids(request, tokenizer)
        for token_id in replayed:
            self.append(token_id)
        self.read_ids = (*request.prompt_ids, *replayed)  # read before the first token is sampled here

    def join(self, rows: TokenRows, slot: int) -> list[int]:
        """From now on `rows` take tokens of this request too, for the returned list."""
        self._rows, self._row = rows, slot
        return self._sampled

    def leave(self) -> None:
        """All tokens are in the list, and no more are taken."""
        self._rows = None

    @property
    def sampled(self) -> list[int]:
        """The ids of all tokens that were sampled; only `append` and `append_plain` change it."""
        if self._rows is not None:
            self._rows.drain(self._row)
        return self._sampled

    @property
    def num_in_flight(self) -> int:
        """Tokens whose sampling was launched and whose ids have not reached the host."""
        return 0 if self._rows is None else int(self._rows.num_in_flight[self._row])

    def landed(self) -> None:
        """A token in flight has reached the host, or will not be used."""
        if self._rows is not None:
            self._rows.num_in_flight[self._row] -= 1

    @property
    def has_plain_tokens(self) -> bool:
        """Whether most tokens are nothing but an id: the reader makes the text, and nothing else depends on it."""
        request = self.request
        return self.tag is not None and request.has_free_text and self.params.is_plain and not request.include_routing

    @property
    def resumed_counts(self) -> Mapping[int, int]:
        """The session's count of each sampled token before this turn."""
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
        """Sampled tokens that the state has read: between steps all but the last one, fewer after a rollback."""
        return len(self.sampled) - 1 if self.num_fed_before_drafts is None else self.num_fed_before_drafts

    @property
    def unread(self) -> list[int]:
        """Sampled tokens that the state has yet to read, oldest first."""
        return self.sampled[self.num_fed :]

    @property
    def generated_counts(self) -> Mapping[int, int]:
        """The count of each sampled token; empty without penalties."""
        return NO_COUNTS if self._counts is None else self._counts

    @property
    def is_complete(self) -> bool:
        """Whether the grammar allows no further token: the answer ends without one that says so."""
        return self.matcher is not None and self.matcher.is_complete

    @property
    def is_constrained(self) -> bool:
        """Whether some ids are impossible for the next token."""
        return self.matcher is not None or len(self.sampled) < self.params.min_tokens

    @property
    def may_rewind(self) -> bool:
        """Whether the end state may be older than the newest state, because a stop string dropped tokens."""
        return self.request.keep_state and bool(self.request.sampling.stop)

    def pop_prompt_states(self) -> list[PromptState]:
        """The prompt states since the last call."""
        states, self.prompt_states = self.prompt_states, []
        return states

    @property
    def forced_id(self) -> int | None:
        """The id that the next token must have, because it was sampled before, on another server."""
        num_sampled = len(self.sampled)
        return self.request.sampled_ids[num_sampled] if num_sampled < len(self.request.sampled_ids) else None

    def append_plain(self, token_id: int) -> str | None:
        """Appends a token that only adds text, and returns the text. None, without any change, for the first and the
        last token, for ids that may end the output or hold text back, and for requests with penalties. Raises
        GrammarFailed for an id that the grammar does not allow.
        """
        sampled = self._sampled if self._rows is None else self.sampled
        if not 0 < len(sampled) < self._num_plain:
            return None
        text = self.output.feed_plain(token_id)
        if text is not None:
            sampled.append(token_id)
            self._count()
            if self.matcher is not None:
                self.matcher.advance(token_id)
        return text

    def append(self, token_id: int) -> OutputStep:
        """Appends a sampled token. Raises GrammarFailed for one that the grammar does not allow."""
        self.sampled.append(token_id)
        self._count()
        if self._counts is not None:
            self._counts.add(token_id)
        if self.matcher is not None and token_id not in self.output.end_ids:
            self.matcher.advance(token_id)
        return self.output.feed(token_id)

    def _count(self) -> None:
        if self._rows is not None:
            self._rows.num_sampled[self._row] = len(self._sampled)


def _replayed_ids(request: GenerationRequest, tokenizer: Tokenizer) -> tuple[int, ...]:
    """The first of `sampled_ids`, which are read like a prompt: no stop string can drop any of them.

    The others, at least one, are sampled again with forced results, so that stops, rewind points and the end are found
    as in an uninterrupted request.
    """
    if not request.sampled_ids:
        return ()
    output, num_replayed = OutputStream(tokenizer, request.sampling), 0
    for number, token_id in enumerate(request.sampled_ids[: request.sampling.max_tokens][:-1], start=1):
        step = output.feed(token_id)
        if step.stop is not None:
            break
        if step.holding_since is None:
            num_replayed = number
    return request.sampled_ids[:num_replayed]
