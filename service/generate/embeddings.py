"""POST /v1/embeddings as a use case: texts -> states -> vectors.

A vector is made of the windows of local attention in the state after the text, or of all of its larger tensors in a
model that has no window. Each tensor is averaged over its next to last axis (a window's tokens, a layer's slots), less
the state that every text starts from, and brought to length 1. The numbers of all are summed into as many buckets
as the vector has numbers, each with a sign; buckets and signs are drawn once, by the tensor's number, so that scalar
products stay what they were, roughly. Nothing of it is trained. `benchmarks/embedding_quality.py` measures it.
"""

from __future__ import annotations

import asyncio
import base64
import functools
import uuid
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nsm_core.engine.request import FinishReason
from nsm_core.errors import NsmError, SnapshotCorrupt
from nsm_core.state.layout import FLOAT, TensorLayout
from service.backends.base import InferenceBackend
from service.deps import Arrival, Services
from service.schemas.embeddings import EmbeddingsBody
from service.state.prefill import read_again
from service.turns.turn import stopping

INPUTS_AT_ONCE = 8
WINDOW = ".kv"  # the end of the names of windows
MIN_AXES = 3
Floats = NDArray[np.float32]


class Embeddings:
    """A checked body. `collect` reads its texts; nothing is left to do after it."""

    def __init__(
        self,
        services: Services,
        tenant: str,
        body: EmbeddingsBody,
        ids: Sequence[tuple[int, ...]],
        arrival: Arrival,
    ) -> None:
        self._services, self._tenant, self._body, self._ids = services, tenant, body, ids
        self._request_id = f"embd-{uuid.uuid4().hex}"
        self._deadline = arrival.time + (body.timeout or services.settings.request_timeout_s)

    def leave(self) -> None:
        """Whoever ends `collect` ends its requests."""

    async def collect(self) -> dict[str, Any]:
        """The whole answer as one object. Raises what `InferenceBackend.submit` raises, and RateLimited."""
        body, services = self._body, self._services
        start = await self._state_of((services.backend.tokenizer.end_of_text_id,), "start")
        vectors: list[Floats] = []
        at_once = services.tenants.at_once(self._tenant, INPUTS_AT_ONCE)
        for first in range(0, len(self._ids), at_once):
            some = self._ids[first : first + at_once]
            with services.tenants.enter(self._tenant, len(some)):
                states = await asyncio.gather(
                    *(self._state_of(ids, str(first + number)) for number, ids in enumerate(some))
                )
            layout = services.backend.model.state_layout
            vectors += await asyncio.to_thread(_sketches, layout, states, start, body.dimensions)
        num_tokens = sum(map(len, self._ids))
        data = [
            {"object": "embedding", "index": index, "embedding": _encoded(vector, body.encoding_format)}
            for index, vector in enumerate(vectors)
        ]
        usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
        return {"object": "list", "data": data, "model": services.model_name, "usage": usage}

    async def _state_of(self, ids: tuple[int, ...], name: str) -> bytes:
        request_id = f"{self._request_id}-{name}"
        return await state_after(self._services.backend, ids, request_id=request_id, deadline=self._deadline)


async def state_after(backend: InferenceBackend, ids: tuple[int, ...], *, request_id: str, deadline: float) -> bytes:
    """The state after `ids`. Raises what `InferenceBackend.submit` raises."""
    finished = await read_again(backend, ids, request_id=request_id, deadline=deadline)
    if finished.end_state is None:
        raise stopping() if finished.reason is FinishReason.ABORT else finished.error or NsmError("the engine failed")
    return finished.end_state.state


async def open_embeddings(services: Services, tenant: str, body: EmbeddingsBody, arrival: Arrival) -> Embeddings:
    """Checks the body; errors become the answer's status."""
    services = await services.for_model(body.model)
    ids = [(await services.prompts.read(one, param="input")).ids for one in body.input]
    return Embeddings(services, tenant, body, ids, arrival)


def _sketches(
    layout: tuple[TensorLayout, ...], states: Sequence[bytes], start: bytes, dimensions: int
) -> list[Floats]:  # fmt: skip
    return [sketch(layout, state, start, dimensions) for state in states]


def sketch(layout: tuple[TensorLayout, ...], state: bytes, start: bytes, dimensions: int) -> Floats:
    """[dimensions] fp32 of length 1; zeros for a state that is the start. Raises SnapshotCorrupt."""
    size = sum(tensor.num_bytes for tensor in layout)
    if len(state) != size or len(start) != size:
        raise SnapshotCorrupt(f"a state of this model has {size} bytes, got {len(state)}")
    total, offset, used = np.zeros(dimensions), 0, _used(layout)
    for number, tensor in enumerate(layout):
        if number in used:
            values = (_values(tensor, state, offset) - _values(tensor, start, offset)).mean(axis=-2).reshape(-1)
            length = float(np.linalg.norm(values))
            if length > 0.0:
                buckets, signs = _draws(number, len(values), dimensions)
                total += np.bincount(buckets, weights=values * signs / length, minlength=dimensions)
        offset += tensor.num_bytes
    length = float(np.linalg.norm(total))
    return (total / length if length > 0.0 else total).astype(np.float32)


def _used(layout: tuple[TensorLayout, ...]) -> set[int]:
    """The numbers of the tensors that a vector is made of: never a layer's last few inputs."""
    large = {number for number, one in enumerate(layout) if one.dtype == FLOAT and len(one.shape) >= MIN_AXES}
    windows = {number for number in large if layout[number].name.endswith(WINDOW)}
    return (
        windows or large or {number for number, one in enumerate(layout) if one.dtype == FLOAT and len(one.shape) > 1}
    )


def _values(tensor: TensorLayout, state: bytes, offset: int) -> NDArray[np.float64]:
    flat = np.frombuffer(state, "<f4", count=tensor.num_values, offset=offset)
    return flat.reshape(tensor.shape).astype(np.float64)


@functools.lru_cache(maxsize=256)
def _draws(number: int, count: int, dimensions: int) -> tuple[NDArray[np.int32], NDArray[np.floating[Any]]]:
    """Bucket and sign of each value of a tensor: the same in every process."""
    random = np.random.Generator(np.random.Philox(key=number))
    return random.integers(0, dimensions, count, dtype=np.int32), random.integers(0, 2, count) * 2.0 - 1.0


def _encoded(vector: Floats, encoding_format: str) -> list[float] | str:
    """Little-endian fp32 for `base64`, as OpenAI's clients read it."""
    if encoding_format == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    return [float(value) for value in vector]
