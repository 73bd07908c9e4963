"""The state after a token log, made by reading it from the start or from an older state."""

from __future__ import annotations

from collections.abc import Callable

from nsm_core.engine.request import Finished, GenerationRequest, Resume
from nsm_core.sampling.params import SamplingParams
from service.backends.background import with_priority
from service.backends.base import Generation, InferenceBackend

# A request samples at least one token; it is never fed, so the end state is the one after the prompt.
_SAMPLE_ONE = SamplingParams(max_tokens=1, temperature=0.0, seed=0, ignore_eos=True)


async def read_again(
    backend: InferenceBackend,
    ids: tuple[int, ...],
    *,
    request_id: str,
    deadline: float,
    on_start: Callable[[Generation], None] = lambda generation: None,
    resume: Resume | None = None,
) -> Finished:
    """Reads `ids` (at least one) from an empty state. The result's `end_state.state` is the one then.

    `resume`: a state after some of them, fewer than all, so that only the rest is read. `on_start` gets what may be
    cancelled. Raises what `InferenceBackend.submit` raises; being cancelled ends it.
    """
    rest = ids if resume is None else ids[resume.position :]
    return await read_on(backend, rest, request_id=request_id, deadline=deadline, on_start=on_start, resume=resume)


async def read_on(
    backend: InferenceBackend,
    ids: tuple[int, ...],
    *,
    request_id: str,
    deadline: float,
    on_start: Callable[[Generation], None] = lambda generation: None,
    resume: Resume | None,
    sampled_at: tuple[tuple[int, int], ...] = (),
) -> Finished:
    """The same of `ids` that follow the state of `resume`. `sampled_at`: see GenerationRequest."""
    request = GenerationRequest(
        request_id=request_id,
        prompt_ids=ids,
        sampling=_SAMPLE_ONE,
        resume=resume,
        keep_state=True,
        deadline=deadline,
        sampled_at=sampled_at,
    )
    generation = backend.submit(with_priority(request))
    on_start(generation)
    try:
        async for event in generation.events():
            if isinstance(event, Finished):
                return event
    except BaseException:
        generation.cancel()
        raise
    raise RuntimeError("the engine ended a request without Finished")
