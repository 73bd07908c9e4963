"""A backend that stands for another one: methods that are not overridden are the other's."""

from __future__ import annotations

from collections.abc import Sequence

from nsm_core.engine.request import GenerationRequest, NamedState
from nsm_core.grammars.grammar import Grammar
from nsm_core.inspection.report import LayerReport
from nsm_core.model_info import ModelInfo
from nsm_core.state.report import Detail, StateReport
from nsm_core.stats import EngineStats
from nsm_core.tokenizer import Tokenizer
from service.backends.base import Generation, InferenceBackend, holder_of


class DelegatingBackend:
    """An InferenceBackend that passes everything on."""

    def __init__(self, backend: InferenceBackend) -> None:
        self._backend = backend

    @property
    def model(self) -> ModelInfo:
        return self._backend.model

    @property
    def tokenizer(self) -> Tokenizer:
        return self._backend.tokenizer

    @property
    def max_requests(self) -> int:
        return self._backend.max_requests

    async def start(self) -> None:
        await self._backend.start()

    async def stop(self) -> None:
        await self._backend.stop()

    def require_room(self) -> None:
        self._backend.require_room()

    def submit(self, request: GenerationRequest) -> Generation:
        return self._backend.submit(request)

    async def check_grammar(self, grammar: Grammar) -> None:
        await self._backend.check_grammar(grammar)

    @property
    def holds_states(self) -> bool:
        holder = holder_of(self._backend)
        return holder is not None and holder.holds_states

    async def fetch_state(self, number: int) -> bytes | None:
        holder = holder_of(self._backend)
        return None if holder is None else await holder.fetch_state(number)

    async def find_state(self, name: str) -> NamedState | None:
        holder = holder_of(self._backend)
        return None if holder is None else await holder.find_state(name)

    def name_state(self, name: str, number: int, about: bytes) -> None:
        if (holder := holder_of(self._backend)) is not None:
            holder.name_state(name, number, about)

    def forget_state(self, name: str) -> None:
        if (holder := holder_of(self._backend)) is not None:
            holder.forget_state(name)

    def drop_state(self, number: int) -> None:
        if (holder := holder_of(self._backend)) is not None:
            holder.drop_state(number)

    async def inspect_state(
        self, state: bytes | None, *, detail: Detail = Detail.LAYER, layer: int | None = None
    ) -> StateReport:
        return await self._backend.inspect_state(state, detail=detail, layer=layer)

    async def inspect_text(
        self, state: bytes | None, ids: Sequence[int], *, has_tokens: bool = False
    ) -> tuple[LayerReport, ...]:
        return await self._backend.inspect_text(state, ids, has_tokens=has_tokens)

    def is_ready(self) -> bool:
        return self._backend.is_ready()

    def stats(self) -> EngineStats:
        return self._backend.stats()
