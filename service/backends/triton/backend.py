"""The model in Triton servers, which this process asks over gRPC. See `docs/triton.md`."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence

from nsm_core.engine.request import Finished, FinishReason, GenerationRequest
from nsm_core.engine.request_check import RequestCheck
from nsm_core.errors import EngineDead, InvalidRequest, Overloaded
from nsm_core.grammars.compiler import CompilePool, GrammarCompiler
from nsm_core.grammars.grammar import Grammar
from nsm_core.inspection.report import LayerReport
from nsm_core.model_info import ModelInfo
from nsm_core.state.layout import StateLayout
from nsm_core.state.report import Detail, StateReport
from nsm_core.stats import EngineStats, add_energy
from nsm_core.tokenizer import Tokenizer
from nsm_core.wire.calls import InspectCall
from service.backends.base import UpstreamStats
from service.backends.triton.generation import TritonGeneration
from service.backends.triton.tls import TritonTls
from service.backends.triton.upstreams import Upstreams


class TritonBackend:
    """An InferenceBackend on one or several Triton servers. Needs neither torch nor the model's files.

    `urls`: host:port of each server's gRPC; `wait_s`: how long `start` waits for a first one; `fingerprint`: of the one
    model to be used, None for whatever the first server has; `tls`: with all of them; `max_interval_s`: see
    StreamPace. Before `start` there is no model
    and no tokenizer.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        wait_s: float,
        fingerprint: str | None = None,
        tls: TritonTls | None = None,
        max_interval_s: float = 0.0,
    ) -> None:
        self.upstreams = Upstreams(urls, wait_s=wait_s, fingerprint=fingerprint, tls=tls, max_interval_s=max_interval_s)
        self._open: dict[str, TritonGeneration] = {}
        self._end: EngineDead | None = EngineDead("the backend was not started")
        self._num_failovers = 0
        self._counts = EngineStats()
        self._model: ModelInfo | None = None
        self._admission: RequestCheck | None = None
        self._compiling: CompilePool | None = None

    @property
    def model(self) -> ModelInfo:
        if self._model is None:
            raise EngineDead("no Triton server has described its model yet")
        return self._model

    @property
    def tokenizer(self) -> Tokenizer:
        return self.upstreams.served[1]

    @property
    def max_requests(self) -> int:
        """What its servers hold together, also those that are down: they may be back when it is tried again."""
        return sum(upstream.capacity for upstream in self.upstreams)

    async def start(self) -> None:
        await self.upstreams.start()
        description, tokenizer = self.upstreams.served
        self._model = description.model
        self._admission = RequestCheck(
            vocab_size=tokenizer.vocab_size,
            spec=StateLayout(self._model.state_layout),
            fingerprint=self._model.fingerprint,
        )
        self._compiling = CompilePool(GrammarCompiler(tokenizer))
        self._end = None

    async def stop(self) -> None:
        self._end = self._end or EngineDead("the backend is stopping")
        if self._compiling is not None:
            self._compiling.close()
        await asyncio.gather(*(generation.stop() for generation in self._open.values()))
        await self.upstreams.stop()

    def require_room(self) -> None:
        if self._end is not None:
            raise EngineDead(str(self._end))
        if not self.upstreams.is_any_up:
            raise EngineDead("no Triton server is ready")
        if self.upstreams.room <= self._num_unplaced():
            raise Overloaded("the queues of all Triton servers are full")

    def submit(self, request: GenerationRequest) -> TritonGeneration:
        if request.request_id in self._open:
            raise InvalidRequest(f"request id {request.request_id} is in use", param="request_id")
        self.require_room()
        if self._admission is None:
            raise EngineDead("the backend was not started")
        self._admission.check(request)
        if request.include_routing:  # servers tell tokens only
            message = "include_routing is not supported with Triton servers"
            raise InvalidRequest(message, param="include_routing", code="unsupported_parameter")
        self._check_scored(request)
        generation = TritonGeneration(request, self.upstreams, on_end=self._count)
        self._open[request.request_id] = generation
        return generation

    def _check_scored(self, request: GenerationRequest) -> None:
        """Other prompts are read in pieces, but a score needs the text before it in the same piece."""
        limit, num_tokens = self.upstreams.max_prompt_tokens, len(request.prompt_ids)
        if request.prompt_logprobs is not None and num_tokens > limit:
            message = f"a prompt whose tokens are scored must have at most {limit} of them, got {num_tokens}"
            raise InvalidRequest(message, param="prompt")

    async def check_grammar(self, grammar: Grammar) -> None:
        """Compiled here only to be checked: the server that runs the request compiles it again."""
        if self._compiling is None:
            raise EngineDead("the backend was not started")
        await self._compiling.check(grammar)

    async def inspect_state(
        self, state: bytes | None, *, detail: Detail = Detail.LAYER, layer: int | None = None
    ) -> StateReport:
        return await self.upstreams.inspect(InspectCall(state=state, detail=detail, layer=layer))

    async def inspect_text(
        self, state: bytes | None, ids: Sequence[int], *, has_tokens: bool = False
    ) -> tuple[LayerReport, ...]:
        raise InvalidRequest(
            "recent is not supported with Triton servers", param="recent", code="unsupported_parameter"
        )

    def is_ready(self) -> bool:
        """Whether some server's engine makes steps; a worker that was killed is noticed within 4 s."""
        return self._end is None and self.upstreams.is_any_up

    def upstream_stats(self) -> UpstreamStats:
        num_up = sum(upstream.is_up for upstream in self.upstreams)
        return UpstreamStats(
            num_up=num_up,
            num_down=len(self.upstreams) - num_up,
            num_failovers=self._num_failovers,
            num_state_hits=self.upstreams.num_state_hits,
            num_state_misses=self.upstreams.num_state_misses,
        )

    def stats(self) -> EngineStats:
        """Requests, tokens and what requests were charged are this gateway's own. Slots, memory, steps and energy are
        the servers', by their last heartbeats: the same in every gateway that shares them. The age of the heartbeat is
        that of the server that was heard last: while one answers, requests are served.
        """
        stats = EngineStats(
            num_waiting=self._num_unplaced(),
            tokens_computed=self._counts.tokens_computed,
            tokens_resumed=self._counts.tokens_resumed,
            tokens_generated=self._counts.tokens_generated,
            request_energy=self._counts.request_energy,
        )
        for upstream in self.upstreams:
            num_running = min(upstream.num_own, upstream.max_slots)
            stats.num_running += num_running
            stats.num_waiting += upstream.num_own - num_running
            stats.max_slots += upstream.max_slots
            stats.state_pool_bytes += upstream.state_pool_bytes
            stats = stats.with_steps(upstream.counted, since=EngineStats())
        ages = (upstream.heartbeat_age_s for upstream in self.upstreams)
        return dataclasses.replace(stats, heartbeat_age_s=min(ages, default=0.0))

    def _num_unplaced(self) -> int:
        return sum(not generation.is_placed for generation in self._open.values())

    def _count(self, generation: TritonGeneration, finished: Finished) -> None:
        del self._open[generation.request.request_id]
        self._num_failovers += generation.num_losses
        num_generated = finished.completion_tokens - len(generation.request.sampled_ids)
        self._counts.tokens_generated += num_generated
        self._counts.request_energy = add_energy(self._counts.request_energy, finished.energy)
        if num_generated or finished.reason is not FinishReason.ERROR:
            self._counts.tokens_computed += finished.prompt_tokens - finished.cached_tokens - finished.shared_tokens
            self._counts.tokens_resumed += finished.cached_tokens
