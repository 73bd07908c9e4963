"""The backend as a session sees it that is served with fewer states: a model of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from nsm_core.engine.request import GenerationRequest
from nsm_core.errors import InvalidRequest
from nsm_core.inspection.report import LayerReport
from nsm_core.model_info import ModelInfo
from nsm_core.state.report import Detail, StateReport
from service.backends.base import Generation, InferenceBackend
from service.backends.delegating import DelegatingBackend


def form_of(backend: InferenceBackend, fingerprint: str) -> InferenceBackend:
    """`backend` as it serves a session of this model fingerprint. Raises StateMismatch where it has no such form."""
    model = backend.model
    form = model.form_of(fingerprint)
    return backend if form is model or form.num_states is None else SmallerForm(backend, form, form.num_states)


class SmallerForm(DelegatingBackend):
    """An InferenceBackend whose model is one of another's `tiers`; it starts and stops with that."""

    def __init__(self, backend: InferenceBackend, model: ModelInfo, num_states: int) -> None:
        super().__init__(backend)
        self._model, self._num_states = model, num_states

    @property
    def model(self) -> ModelInfo:
        return self._model

    def submit(self, request: GenerationRequest) -> Generation:
        return self._backend.submit(dataclasses.replace(request, num_states=self._num_states))

    async def inspect_state(
        self,
        state: bytes | None,
        *,
        detail: Detail = Detail.LAYER,
        layer: int | None = None,
        num_states: int | None = None,
    ) -> StateReport:
        size = self._required(num_states)
        return await self._backend.inspect_state(state, detail=detail, layer=layer, num_states=size)

    async def inspect_text(
        self, state: bytes | None, ids: Sequence[int], *, num_states: int | None = None
    ) -> tuple[LayerReport, ...]:
        return await self._backend.inspect_text(state, ids, num_states=self._required(num_states))

    def _required(self, num_states: int | None) -> int:
        if num_states not in (None, self._num_states):
            raise InvalidRequest(f"num_states must be {self._num_states}, got {num_states}", param="num_states")
        return self._num_states
