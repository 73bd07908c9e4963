"""The values that go into an engine and come out of it. No torch here, so a gateway without one can use them."""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Iterable, Mapping

from nsm_core.errors import NsmError
from nsm_core.inspection.routing import TokenRouting
from nsm_core.sampling.params import SamplingParams
from nsm_core.sampling.result import TokenLogprob as TokenLogprob  # part of this contract, defined where it is made
from nsm_core.stats import EnergyUse


class FinishReason(enum.StrEnum):
    """Why a request ended."""

    STOP = "stop"  # end-of-text token, stop id or stop string
    LENGTH = "length"  # max_tokens
    ABORT = "abort"  # cancelled by the caller, or drained
    ERROR = "error"  # see Finished.error


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """A stored state to start from.

    `state` holds the tensors of one sequence as bytes (`StateSpec.pack`), `position` the number of tokens fed to reach
    it, `fingerprint` the model that made it, `generated_counts` how often this session sampled each token (penalties).
    """

    state: bytes
    position: int
    fingerprint: str
    generated_counts: Mapping[int, int]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One call to the engine.

    `prompt_ids`: the tokens to read first, in order (the caller puts a session's pending token in front); never empty.
    `keep_state`: whether Finished must carry an EndState. `prompt_logprobs`: None, or how many alternatives to report
    for each prompt token. `deadline`: a `time.monotonic()` reading after which the request ends with DeadlineExceeded.
    `generated_counts`: only without `resume`, for a session whose whole log is read again: how often it had sampled
    each token (penalties). `keep_states_at`: rising numbers of prompt tokens; the state after each is sent as a
    PromptState.
    `sampled_ids`: what was sampled of this request before, somewhere else: it goes on after them as if it had never
    been interrupted. They count as output (penalties, stop strings, max_tokens); events come for those after them.
    `include_routing`: whether its TokenEvents tell what the states did.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    resume: Resume | None = None
    keep_state: bool = False
    prompt_logprobs: int | None = None
    deadline: float | None = None
    generated_counts: Mapping[int, int] = dataclasses.field(default_factory=dict)
    keep_states_at: tuple[int, ...] = ()
    sampled_ids: tuple[int, ...] = ()
    include_routing: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PromptScored:
    """Sent once, before the first token, when prompt_logprobs was asked for; entry i belongs to prompt_ids[i].

    The first entry is always None: nothing was fed before it, or what was belongs to a resumed state, which keeps no
    logits.
    """

    logprobs: tuple[TokenLogprob | None, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PromptState:
    """The state inside or at the end of the prompt, where `keep_states_at` asked for it.

    Sent before the first token, one for each place: a prompt whose numbers are not finite gives none. `position`:
    tokens fed to reach `state` (`StateSpec.pack`), resumed ones included.
    """

    position: int
    state: bytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, init=False)
class TokenEvent:
    """One sampled token: `index` counts from 1; `text` is what became visible with it (may be empty).

    `routing`: of the step that made it, where that was asked for; no part of the result.
    """

    index: int
    token_id: int
    text: str
    logprob: TokenLogprob | None = None
    routing: TokenRouting | None = dataclasses.field(default=None, compare=False)

    def __init__(
        self,
        *,
        index: int,
        token_id: int,
        text: str,
        logprob: TokenLogprob | None = None,
        routing: TokenRouting | None = None,
    ) -> None:
        # Steps make hundreds of them: the generated form, by object.__setattr__, takes nearly twice the time
        _set_index(self, index)
        _set_token_id(self, token_id)
        _set_text(self, text)
        _set_logprob(self, logprob)
        _set_routing(self, routing)


_set_index, _set_token_id, _set_text, _set_logprob, _set_routing = (
    TokenEvent.__dict__[field.name].__set__ for field in dataclasses.fields(TokenEvent)
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EndState:
    """What a session keeps after a turn.

    `new_ids`: ids to append to the token log: prompt_ids without a leading pending token the log already has is the
    caller's business; here it is exactly prompt_ids + the kept sampled tokens. Tokens that belong to a stop string or
    stop id are not kept: they are not visible. `pending`: the last kept sampled token if it was not fed, else None.
    `position`: tokens fed to reach `state`; always resumed position + len(new_ids) - (pending is not None).
    """

    state: bytes
    position: int
    pending: int | None
    new_ids: tuple[int, ...]
    generated_counts: Mapping[int, int]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Where a request's time went, in seconds: in the queue until it got a slot, then to its first token, then to its
    end. `prefill_s`: None for a request that sampled nothing.
    """

    queue_s: float
    prefill_s: float | None = None
    decode_s: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The last event of every request, whatever happens to it.

    `text`: visible text released at the end. `stop_reason`: the stop string or stop id that matched, None for
    end-of-text. `num_dropped_tokens`: how many of the last TokenEvents are not visible because of a stop string or id.
    `cached_tokens`: tokens covered by the resumed state; `prompt_tokens` includes them. `timings`: None from an engine
    that did not tell; `energy`: this request's share, empty where nothing is measured. Both are no part of the result:
    equal requests end equal.
    """

    reason: FinishReason
    text: str = ""
    stop_reason: str | int | None = None
    num_dropped_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    end_state: EndState | None = None
    error: NsmError | None = None
    timings: Timings | None = dataclasses.field(default=None, compare=False)
    energy: tuple[EnergyUse, ...] = dataclasses.field(default=(), compare=False)


Event = PromptScored | PromptState | TokenEvent | Finished


def joules_of(ends: Iterable[Finished]) -> float:
    """Of all sources together."""
    return math.fsum(use.joules for end in ends for use in end.energy)
