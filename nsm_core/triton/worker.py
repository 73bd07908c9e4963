"""An engine, and an event loop on a thread of its own: calls come from any thread, answers go to their responders."""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import itertools
import logging
import secrets
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nsm_core.engine.async_engine import AsyncEngine, GenerationHandle
from nsm_core.engine.engine import Engine
from nsm_core.engine.request import GenerationRequest
from nsm_core.engine.step_stats import meter_of
from nsm_core.engine.token_rows import Ints
from nsm_core.errors import EngineDead, InvalidRequest, NsmError
from nsm_core.execution.choose import choose_executor
from nsm_core.execution.devices import engine_config
from nsm_core.heap import keep_freed_memory, trim_heap
from nsm_core.loaded_model import LoadedModel, SequenceModel
from nsm_core.model.observer import observer_of
from nsm_core.sampling.params import SEED_BITS
from nsm_core.state.inspection import inspect_state
from nsm_core.triton.call_stats import CallStats, MeasuredResponder
from nsm_core.triton.config import MIB, WorkerConfig
from nsm_core.triton.forwarding import Pacing, forward_stream, forward_whole
from nsm_core.triton.instances import Instances
from nsm_core.triton.limits import CallLimits
from nsm_core.triton.link import Link
from nsm_core.triton.responder import Responder
from nsm_core.triton.state_cache import StateCache
from nsm_core.wire.call_tensors import check_generate, decode_call
from nsm_core.wire.calls import (
    DescribeCall,
    GenerateCall,
    InspectCall,
    LinkCall,
    PostCall,
    StatusCall,
    request_of,
    state_id,
)
from nsm_core.wire.description import WorkerDescription, WorkerStatus, encode_description, encode_report, encode_status
from nsm_core.wire.errors import Failure, StateMissing
from nsm_core.wire.events import EventEncoder
from nsm_core.wire.link import decode_to_worker
from nsm_core.wire.tensors import INPUT_IDS, STATE, TEXT_INPUT, Tensors, refuse

logger = logging.getLogger("nsm.triton")

DRAIN_TURN_S = 0.05
ABORT_S = 3.0  # for the step that runs, and for last answers


@dataclasses.dataclass(frozen=True, slots=True)
class _Open:
    """A request in the engine, for whoever watches its client."""

    handle: GenerationHandle
    responder: Responder


class Worker:
    """What stands behind the Triton model; knows nothing of Triton. `start` and `stop` once each."""

    def __init__(
        self, loaded: LoadedModel[SequenceModel], config: WorkerConfig, *, instance: tuple[str, Path] | None = None
    ) -> None:
        """`instance`: its name and the directory of all, see `Instances`; None where there is no other."""
        chosen = choose_executor(loaded, config.executor)
        self._engine_config = engine_config(config.engine, loaded)
        self._model, self._tokenizer, self._fingerprint = chosen.model, loaded.tokenizer, loaded.fingerprint
        self._config = config
        self._limits = CallLimits(config, loaded.tokenizer.vocab_size)
        self._stepped = threading.Event()
        engine = Engine(
            chosen.model,
            loaded.tokenizer,
            fingerprint=loaded.fingerprint,
            config=self._engine_config,
            executor=chosen.factory,
            meter=meter_of(loaded.device, core_watts=config.energy_core_watts) if config.energy else None,
            observer=observer_of(chosen.model),
        )
        self._info = dataclasses.replace(loaded.info, numerics=chosen.numerics, replays_exactly=engine.replays_exactly)
        self._engine = AsyncEngine(engine, after_step=self._stepped.set)
        self._engine.listen_tokens(self._take_tokens)
        self.calls = CallStats()
        self._states = StateCache(config.kept_states_mb * MIB)
        tokenizer = loaded.tokenizer
        self._max_token_bytes = max(len(tokenizer.token_bytes(token_id)) for token_id in range(tokenizer.vocab_size))
        self._open: dict[str, _Open] = {}  # the loop's
        self._tasks: set[asyncio.Task[None]] = set()
        self._numbers = itertools.count()
        self._pacing, self._link_pacing = Pacing(), Pacing()
        self._links: dict[str, Link] = {}  # the loop's
        self._listeners: dict[int, Link] = {}
        self._indices = itertools.count(1)  # of listeners
        self._instances = None if instance is None else Instances(*instance, self.accept)
        self._is_draining = False
        self._drained: concurrent.futures.Future[None] | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="nsm-worker", daemon=True)

    def start(self) -> None:
        """Ready for calls when it returns."""
        trim_heap()  # whoever loaded the model has let it go by now
        keep_freed_memory()
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result()

    async def _start(self) -> None:
        await self._engine.start()
        if self._instances is not None:
            await self._instances.start()

    def begin_stop(self) -> concurrent.futures.Future[None]:
        """New calls are refused; those that run may go on for `drain_s`, then they end with `abort`, and the result is
        there. One thread.
        """
        if self._drained is None:
            self._is_draining = True
            self._drained = asyncio.run_coroutine_threadsafe(self._drain(), self._loop)
        return self._drained

    @property
    def stop_limit_s(self) -> float:
        """Seconds that `begin_stop` takes at most, whatever hangs in the engine."""
        return self._config.drain_s + 3 * ABORT_S

    def stop(self) -> None:
        """Returns when that is done and the threads have ended."""
        self.begin_stop().result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def accept(self, tensors: Tensors, parameters: Mapping[str, Any], responder: Responder) -> None:
        """Takes a call and returns at once; whatever becomes of it goes to the responder. Any thread.

        The tensors must be the worker's own: they are read later.
        """
        self._loop.call_soon_threadsafe(self._spawn, tensors, parameters, responder)

    def wait_for_step(self, timeout_s: float) -> None:
        """Until a step was made since the last call, or no longer than that. One thread."""
        self._stepped.wait(timeout_s)
        self._stepped.clear()

    def cancel_abandoned(self, *, is_batch_only: bool = False) -> None:
        """Ends the requests whose clients have left, and the links of gateways that have; `is_batch_only`: requests
        that hold a slot, not those that wait.

        Blocks for a moment per request or link; any thread but the loop's.
        """
        requests = list(self._open.values())  # in order of arrival, and that is the order in which slots are given
        for request in requests[: self._engine_config.max_slots] if is_batch_only else requests:
            if request.responder.is_cancelled():
                request.handle.cancel()
        for link in [] if is_batch_only else list(self._links.values()):
            if link.responder.is_cancelled():
                self._loop.call_soon_threadsafe(link.leave)
        for relay in [] if is_batch_only or self._instances is None else list(self._instances.relays):
            if relay.responder.is_cancelled():
                self._loop.call_soon_threadsafe(relay.leave)

    def status(self) -> WorkerStatus:
        """Any thread."""
        return WorkerStatus(
            is_ready=self._engine.is_ready() and not self._is_draining,
            engine=self._engine.stats(),
            states=self._states.stats(),
        )

    def _spawn(self, tensors: Tensors, parameters: Mapping[str, Any], responder: Responder) -> None:
        task = self._loop.create_task(self._answer(tensors, parameters, responder))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, tensors: Tensors, parameters: Mapping[str, Any], responder: Responder) -> None:
        """A call's whole life. However it ends, its client gets one last answer.

        One that names another instance of the server is handed on to it.
        """
        instance = parameters.get("instance")
        if instance is not None and self._instances is not None and instance != self._instances.name:
            await self._hand_on(self._instances, str(instance), tensors, parameters, responder)
            return
        responder, plain = MeasuredResponder(responder, self.calls), responder
        try:
            call = decode_call(tensors, parameters, draw_seed=lambda: secrets.randbits(SEED_BITS))
            if isinstance(call, GenerateCall):
                await self._generate(call, responder)
            elif isinstance(call, LinkCall):
                await self._serve_link(call, plain)
            elif isinstance(call, PostCall):
                self._post(call)
                plain.close()
            else:
                plain.send(await self._describe_or_inspect(call), is_last=True)
        except (NsmError, StateMissing) as error:
            responder.fail(Failure(error=error))
        except asyncio.CancelledError:
            responder.fail(Failure(error=EngineDead("the worker is stopping, and its engine hangs")))
        except Exception as error:
            logger.exception("a call failed")
            responder.fail(Failure(error=error))

    async def _hand_on(
        self, instances: Instances, name: str, tensors: Tensors, parameters: Mapping[str, Any], responder: Responder
    ) -> None:
        try:
            await instances.hand_on(name, tensors, parameters, responder)
        except NsmError as error:
            responder.fail(Failure(error=error))
        except Exception as error:
            logger.exception("a call was not handed on")
            responder.fail(Failure(error=error))

    async def _serve_link(self, call: LinkCall, responder: Responder) -> None:
        if self._is_draining:
            responder.fail(Failure(error=EngineDead("the worker is stopping")))
            return
        if call.name in self._links:
            refuse("link", "a new name", call.name)
        index = next(self._indices)
        link = Link(
            responder,
            index,
            open_request=self._open_linked,
            keep=self._keep,
            stats=self.calls,
            pacing=self._link_pacing,
        )
        self._links[call.name] = self._listeners[index] = link
        try:
            await link.run()
        finally:
            del self._links[call.name], self._listeners[index]
        responder.fail(Failure(error=EngineDead("the worker is stopping")))  # unless the gateway has left

    def _post(self, call: PostCall) -> None:
        link = self._links.get(call.name)
        if link is None:
            raise EngineDead(f"there is no link {call.name}")
        link.post(call.number, decode_to_worker(call.messages))

    def _take_tokens(self, index: int, numbers: Ints, ids: Ints) -> None:
        link = self._listeners.get(index)
        if link is not None:
            link.add_tokens(numbers, ids)

    def _open_linked(self, call: GenerateCall, tag: int) -> GenerationHandle:
        """A request of a link, in the engine."""
        if self._is_draining:
            raise EngineDead("the worker is stopping")
        check_generate(call)
        call = self._limits.bounded(call)
        prompt_ids = self._checked_ids(call, INPUT_IDS, call.prompt_ids)
        return self._engine.submit(self._request_of(call, prompt_ids), tag=tag)

    def _request_of(self, call: GenerateCall, prompt_ids: tuple[int, ...]) -> GenerationRequest:
        """Raises StateMissing."""
        request_id, state = str(next(self._numbers)), self._state_of(call)
        return request_of(call, request_id, prompt_ids=prompt_ids, state=state, now=time.monotonic())

    async def _describe_or_inspect(self, call: DescribeCall | StatusCall | InspectCall) -> dict[str, Any]:
        if isinstance(call, DescribeCall):
            return encode_description(self._describe())
        if isinstance(call, InspectCall):
            model, state = self._model, call.state
            report = await asyncio.to_thread(
                lambda: inspect_state(
                    model.state_spec, state, model.initial_state(1), detail=call.detail, layer=call.layer
                )
            )
            return encode_report(report)
        return encode_status(self.status())

    def _describe(self) -> WorkerDescription:
        engine = self._engine_config
        return WorkerDescription(
            model=self._info,
            tokenizer=self._tokenizer.to_json(),
            max_slots=engine.max_slots,
            queue_limit=engine.queue_limit,
            max_prompt_tokens=self._config.max_prompt_tokens,
            instances=() if self._instances is None else self._instances.names(),
        )

    async def _generate(self, call: GenerateCall, responder: Responder) -> None:
        if self._is_draining:
            raise EngineDead("the worker is stopping")
        call = self._limits.bounded(call)
        request = self._request_of(call, await self._prompt_ids(call))
        encoder = EventEncoder(
            call,
            fingerprint=self._fingerprint,
            num_prompt=len(request.prompt_ids),
            name_state=self._keep if call.keep_state else state_id,
        )
        handle = self._engine.submit(request)
        self._open[request.request_id] = _Open(handle, responder)
        try:
            if call.stream:
                await forward_stream(handle, encoder, responder, self._pacing)
            else:
                await forward_whole(handle, encoder, responder)
        finally:
            handle.cancel()  # of no effect unless sending failed
            del self._open[request.request_id]

    async def _prompt_ids(self, call: GenerateCall) -> tuple[int, ...]:
        """A fresh text is read behind the end-of-text token."""
        limit = self._config.max_prompt_tokens
        ids, name = call.prompt_ids, INPUT_IDS
        if call.text is not None:
            tokenizer, name = self._tokenizer, TEXT_INPUT
            if len(call.text) > limit * self._max_token_bytes:  # hopeless, before the work of encoding it
                refuse(name, f"at most {limit} tokens", f"{len(call.text)} characters")
            start = () if call.resume is not None else (tokenizer.end_of_text_id,)
            # a long text takes long, and the loop serves every stream
            ids = (*start, *(await asyncio.to_thread(tokenizer.encode, call.text)))
        return self._checked_ids(call, name, ids)

    def _checked_ids(self, call: GenerateCall, name: str, ids: tuple[int, ...] | None) -> tuple[int, ...]:
        limit = self._config.max_prompt_tokens
        if ids is None:
            raise InvalidRequest("exactly one of text_input and input_ids is required", param=name)
        if len(ids) > limit:
            refuse(name, f"at most {limit} tokens", f"{len(ids)} tokens")
        self._limits.check_ids(call, ids)
        return ids

    def _state_of(self, call: GenerateCall) -> bytes | None:
        """The bytes of the state to resume: those that came, or those kept. Raises StateMissing."""
        wanted = None if call.resume is None else call.resume.state_id
        if call.state is None:
            state = None if wanted is None else self._states.get(wanted)
            if wanted is not None and state is None:
                raise StateMissing(f"no state {wanted} is kept here: send its bytes")
            return state
        if wanted is not None and self._keep(call.state) != wanted:
            refuse("resume.state_id", f"the SHA-256 of {STATE}", wanted)
        return call.state

    def _keep(self, state: bytes) -> str:
        name = state_id(state)
        self._states.put(name, state)
        return name

    async def _drain(self) -> None:
        deadline = time.monotonic() + self._config.drain_s
        for link in self._links.values():
            link.drain()
        while self._tasks and time.monotonic() < deadline and self._engine.is_ready():
            await asyncio.wait(self._tasks, timeout=DRAIN_TURN_S)
        try:
            async with asyncio.timeout(ABORT_S):
                await self._engine.stop()
                while self._tasks:
                    await asyncio.wait(self._tasks)  # their last answers
        except TimeoutError:
            logger.error("the engine or the server hangs: requests end without their last events")
            for task in self._tasks:
                task.cancel()
            if self._tasks:
                await asyncio.wait(self._tasks, timeout=ABORT_S)
        if self._instances is not None:  # not before: calls that cancel what runs come through the others too
            self._instances.stop_listening()
            await self._instances.close(ABORT_S)
