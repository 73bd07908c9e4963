"""The engine's requests and events. No torch here: a gateway on Triton servers uses them too."""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Iterable, Mapping

from nsm_core.errors import InvalidRequest, NsmError
from nsm_core.inspection.routing import TokenRouting
from nsm_core.sampling.params import SamplingParams
from nsm_core.sampling.result import TokenLogprob as TokenLogprob  # a part of events, made by the sampler
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

    `state`: the tensors of one sequence as bytes (`StateSpec.pack`), empty if `held` names one that the engine holds.
    `position`: the number of tokens fed to reach it. `fingerprint`: of the model that made it. `generated_counts`: the
    session's count of each sampled token (penalties).
    """

    state: bytes
    position: int
    fingerprint: str
    generated_counts: Mapping[int, int]
    held: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class SharedPrompt:
    """The name that requests with one prompt and one start have in common, and how many of them there are.

    Raises InvalidRequest for a name that is empty or a number below 2.
    """

    name: str
    num_requests: int

    def __post_init__(self) -> None:
        if not self.name or self.num_requests < 2:
            message = f"shared_prompt must be a name and at least 2 requests, got {self.num_requests}"
            raise InvalidRequest(message, param="shared_prompt")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One call to the engine.

    `prompt_ids`: the tokens to read first, in order (the caller puts a session's pending token in front); never empty.
    `keep_state`: whether Finished must carry an EndState. `prompt_logprobs`: None, or the number of alternatives to
    report for each prompt token. `deadline`: a `time.monotonic()` reading after which the request ends with
    DeadlineExceeded. `generated_counts`: only without `resume`, for a session whose whole log is read again: its count
    of each sampled token (penalties). `keep_states_at`: rising numbers of prompt tokens; the state after each is sent
    as a PromptState. `sampled_ids`: tokens of this request that another server has sampled. The request continues after
    them as if it had not been interrupted. They count as output (penalties, stop strings, max_tokens) and have no
    events. `include_routing`: whether its TokenEvents carry the routing of the model's states. `shared_prompt`: of
    requests that are submitted together; one of them reads the prompt for all, and no event of any of them is changed.
    `owner`: owners share the reading of prompts; Triton servers do not learn it. `hold_state`: the end state stays with
    the engine (`EndState.held`). `sampled_at`: [start, stop) of tokens of the prompt that were sampled once, in order;
    an executor that `reads_sampled_singly` reads them as it did then, one by one. `is_background`: it stands behind
    requests that are not (see Scheduler); Triton servers do not learn it.
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
    shared_prompt: SharedPrompt | None = None
    owner: str = ""
    hold_state: bool = False
    sampled_at: tuple[tuple[int, int], ...] = ()
    is_background: bool = False

    @property
    def has_free_text(self) -> bool:
        """Whether the text follows from the ids of its tokens alone, wherever it is made: no stop string looks into it,
        and no token of it was made elsewhere.
        """
        return not self.sampling.stop and not self.sampled_ids


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PromptScored:
    """Sent once, before the first token, for requests with prompt_logprobs; entry i belongs to prompt_ids[i].

    The first entry is always None: no token was fed before it, or only those of a resumed state, which holds no logits.
    """

    logprobs: tuple[TokenLogprob | None, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PromptState:
    """The state inside or at the end of the prompt, at a position of `keep_states_at`.

    Sent before the first token, one for each position; a prompt whose logits are not finite has none. `position`:
    tokens fed to reach `state` (`StateSpec.pack`), resumed ones included.
    """

    position: int
    state: bytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, init=False)
class TokenEvent:
    """One sampled token. `index` counts from 1; `text` is the newly visible text (may be empty).

    `routing`: of the step that sampled it, for requests with `include_routing`. Equality ignores it.
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
        # A step makes hundreds of events: the generated __init__, by object.__setattr__, takes nearly twice the time
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
    """The state and log of a session after a turn.

    `new_ids`: prompt_ids and the visible sampled tokens, for the token log; the caller removes a leading pending token
    that the log already has. Tokens of a stop string or stop id are not visible and not included. `pending`: the last
    of `new_ids` if it was not fed, else None. `position`: tokens fed to reach `state`; always resumed position +
    len(new_ids) - (pending is not None). `held`: the number under which the engine holds the state, if that was asked;
    then `state` is empty.
    """

    state: bytes
    position: int
    pending: int | None
    new_ids: tuple[int, ...]
    generated_counts: Mapping[int, int]
    held: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class NamedState:
    """A state that an engine holds under `number`. `about`: facts from the caller that named it."""

    number: int
    about: bytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """A request's time in seconds: in the queue, from its slot to its first token, and from there to its end.

    `prefill_s`: None for a request that sampled no token.
    """

    queue_s: float
    prefill_s: float | None = None
    decode_s: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The last event of every request, however it ends.

    `text`: visible text released at the end. `stop_reason`: the stop string or stop id that matched, None for
    end-of-text. `num_dropped_tokens`: the number of last TokenEvents that are not visible because of a stop string
    or id; `tail`: the visible bytes of the first of them, if a stop string begins inside it. `cached_tokens`:
    tokens covered by the resumed state; `prompt_tokens` includes them. `replayed_tokens`: those of a session's prompt
    that it had read before, without a state that covers them; the engine does not know. `timings`: None if the engine
    did not report them. `energy`: this request's share, empty without a meter. `shared_tokens`: prompt tokens that
    another request has read for this one. Equality ignores the last three.
    """

    reason: FinishReason
    text: str = ""
    stop_reason: str | int | None = None
    num_dropped_tokens: int = 0
    tail: bytes = b""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    replayed_tokens: int = 0
    completion_tokens: int = 0
    end_state: EndState | None = None
    error: NsmError | None = None
    timings: Timings | None = dataclasses.field(default=None, compare=False)
    energy: tuple[EnergyUse, ...] = dataclasses.field(default=(), compare=False)
    shared_tokens: int = dataclasses.field(default=0, compare=False)


Event = PromptScored | PromptState | TokenEvent | Finished


def joules_of(ends: Iterable[Finished]) -> float:
    """The energy of all sources together, in joules."""
    return math.fsum(use.joules for end in ends for use in end.energy)
