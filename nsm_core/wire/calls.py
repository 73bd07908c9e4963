"""The calls to a worker, as values."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from nsm_core.engine.request import GenerationRequest, Resume, SharedPrompt
from nsm_core.hashing import identity
from nsm_core.sampling.params import SamplingParams
from nsm_core.state.report import Detail

MAX_TIMEOUT_S = 86_400.0  # of any call, as over HTTP


def state_id(state: bytes) -> str:
    """The name of a state in a worker's cache: the identity of its bytes.

    1.2 ms for 2 MiB; Python's lock is free meanwhile.
    """
    return identity(state)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ResumePoint:
    """Where a state stands, without its bytes: what the last event of a turn tells and the next turn gives back.

    `pending`: the token sampled last, if it was not fed; the worker reads it in front of the prompt. `state_id`: under
    which a worker may have cached the bytes.
    """

    position: int
    fingerprint: str
    generated_counts: Mapping[int, int]
    pending: int | None = None
    state_id: str | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GenerateCall:
    """A text to go on from. Exactly one of `text` and `prompt_ids`.

    `state`: the bytes of `resume`; None with a `state_id` there means "only if you do not have them", and a worker that
    lacks them answers StateMissing. `return_state`: the last event carries the end state's bytes. `keep_state`: the
    worker keeps them, and the last event names their id. `stream`: an event for each token; otherwise one event in all.
    `timeout_s`: seconds from the worker's reading of the call. The others are those of GenerationRequest.
    """

    text: str | None = None
    prompt_ids: tuple[int, ...] | None = None
    sampling: SamplingParams
    stream: bool = False
    resume: ResumePoint | None = None
    state: bytes | None = None
    return_state: bool = False
    keep_state: bool = False
    prompt_logprobs: int | None = None
    timeout_s: float | None = None
    generated_counts: Mapping[int, int] = dataclasses.field(default_factory=dict)
    keep_states_at: tuple[int, ...] = ()
    sampled_ids: tuple[int, ...] = ()
    shared_prompt: SharedPrompt | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class DescribeCall:
    """The call for the worker's description: see `description.py`."""


@dataclasses.dataclass(frozen=True, slots=True)
class StatusCall:
    """Whether the engine's steps go on, and its counters: see `description.py`."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class InspectCall:
    """The call of `InferenceBackend.inspect_state`. `state` None: the learned start."""

    state: bytes | None = None
    detail: Detail = Detail.LAYER
    layer: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class LinkCall:
    """The long call of a gateway, see `link.py`. `name`: no other link has it."""

    name: str


@dataclasses.dataclass(frozen=True, slots=True)
class PostCall:
    """Messages to the worker of a link, of which this is the `number`th such call, from 0 on."""

    name: str
    number: int
    messages: bytes


Call = GenerateCall | DescribeCall | StatusCall | InspectCall | LinkCall | PostCall


def call_of(request: GenerationRequest, *, now: float) -> GenerateCall:
    """The gateway's side: an engine request as a streamed call that returns, and has kept, what the request keeps.

    `now`: `time.monotonic()`; a deadline that has passed becomes the shortest time-out, an infinite one the
    longest. Digests a
    resumed state, see `state_id`.
    """
    resume = request.resume
    point = None
    if resume is not None:
        point = ResumePoint(
            position=resume.position,
            fingerprint=resume.fingerprint,
            generated_counts=resume.generated_counts,
            state_id=state_id(resume.state),
        )
    return GenerateCall(
        prompt_ids=request.prompt_ids,
        sampling=request.sampling,
        stream=True,
        resume=point,
        state=None if resume is None else resume.state,
        return_state=request.keep_state,
        keep_state=request.keep_state,
        prompt_logprobs=request.prompt_logprobs,
        timeout_s=_time_left(request.deadline, now),
        generated_counts=request.generated_counts,
        keep_states_at=request.keep_states_at,
        sampled_ids=request.sampled_ids,
        shared_prompt=request.shared_prompt,
    )


def _time_left(deadline: float | None, now: float) -> float | None:
    """A deadline may be infinite; a call ends at some time."""
    return None if deadline is None else min(MAX_TIMEOUT_S, max(1e-3, deadline - now))


def request_of(
    call: GenerateCall, request_id: str, *, prompt_ids: tuple[int, ...], state: bytes | None, now: float
) -> GenerationRequest:
    """The worker's side. `prompt_ids`: of the text, or the call's own; `state`: the bytes of `call.resume`."""
    point, resume = call.resume, None
    if point is not None and state is not None:
        resume = Resume(
            state=state,
            position=point.position,
            fingerprint=point.fingerprint,
            generated_counts=point.generated_counts,
        )
    pending = () if point is None or point.pending is None else (point.pending,)
    return GenerationRequest(
        request_id=request_id,
        prompt_ids=pending + prompt_ids,
        sampling=call.sampling,
        resume=resume,
        keep_state=call.return_state or call.keep_state,
        prompt_logprobs=call.prompt_logprobs,
        deadline=None if call.timeout_s is None else now + call.timeout_s,
        generated_counts=call.generated_counts,
        keep_states_at=call.keep_states_at,
        sampled_ids=call.sampled_ids,
        shared_prompt=call.shared_prompt,
    )
