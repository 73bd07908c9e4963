"""Between Triton's Python backend and the worker: reads requests, watches their clients, publishes figures."""

from __future__ import annotations

import concurrent.futures
import json
import logging
import math
import os
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from nsm_core.architectures import open_model
from nsm_core.control_group import usable_threads
from nsm_core.errors import ConfigError
from nsm_core.execution.devices import on_device
from nsm_core.execution.names import AUTO_DEVICE
from nsm_core.triton.call_stats import MeasuredResponder
from nsm_core.triton.config import WorkerConfig, read_config
from nsm_core.triton.instances import directory_of
from nsm_core.triton.metrics import TritonMetrics
from nsm_core.triton.responder import TritonResponder
from nsm_core.triton.stop_signal import StopSignal
from nsm_core.triton.worker import Worker
from nsm_core.wire.errors import Failure

logger = logging.getLogger("nsm.triton")

WATCH_S = 0.05  # between two looks at the server, and at requests that wait
PUBLISH_S = 1.0
# Asking a request whether its client has left is a round trip through shared memory of 0.1 ms, most of it CPU time. The
# batch is asked after each step; where steps are shorter than ten times the asking, some are passed over.
PAUSE_TO_ASKING = 9.0
EXIT_ORPHANED = EXIT_STUCK = 70  # EX_SOFTWARE
FINALIZE_S = 3.0  # for the threads to end
LET_GO_S = (
    15.0  # within which Triton lets a model go that has answered everything: at once, on a machine with time left
)


class Backend:
    """One model instance. `pb_utils`: the module `triton_python_backend_utils`."""

    def __init__(
        self, worker: Worker, pb_utils: Any, *, labels: dict[str, str], stop_signal: StopSignal | None = None
    ) -> None:
        self._worker = worker
        self._pb_utils = pb_utils
        self._metrics = TritonMetrics(pb_utils, labels)
        self._is_finalizing = False
        self._is_closing = threading.Event()
        self._server_pid = os.getppid()
        self._stop_signal = stop_signal
        # two, because a question to a server that was just killed is never answered
        self._threads = [
            threading.Thread(target=self._watch_server, name="nsm-watch", daemon=True),
            threading.Thread(target=self._watch_clients, name="nsm-clients", daemon=True),
        ]
        worker.start()
        for thread in self._threads:
            thread.start()

    @classmethod
    def load(cls, args: Mapping[str, str], pb_utils: Any) -> Backend:
        """`args`: of `initialize`. Raises ConfigError or CheckpointError, told by name."""
        config = read_config(args["model_config"])
        torch.set_num_threads(config.num_threads or usable_threads(torch.get_num_threads()))
        try:
            worker = on_device(
                device_of(config, args),
                config.executor,
                lambda device: open_model(config.model, device),
                lambda loaded: Worker(
                    loaded, config, instance=(args["model_instance_name"], directory_of(os.getppid()))
                ),
            )
        except MemoryError as error:
            raise ConfigError(f"config.pbtxt: parameter max_slots is too large: {error}") from error
        logger.info("%s: %s", args["model_instance_name"], config)
        names = ("model_name", "model_version", "model_instance_name")
        labels = {name: args[name] for name in names}
        return cls(worker, pb_utils, labels=labels, stop_signal=StopSignal())

    def execute(self, requests: Sequence[Any]) -> None:
        """Returns at once. A request that cannot even be read is answered and hurts no other."""
        for request in requests:
            responder = TritonResponder(self._pb_utils, request)
            try:
                # Triton takes a request's memory back when this returns
                tensors = {tensor.name(): tensor.as_numpy().copy() for tensor in request.inputs()}
                parameters = json.loads(request.parameters() or "{}")
            except Exception as error:
                logger.exception("a request could not be read")
                MeasuredResponder(responder, self._worker.calls).fail(Failure(error=error))
            else:
                self._worker.accept(tensors, parameters, responder)

    def close(self) -> None:
        """Drains: what runs may go on for a while. Once."""
        self._is_finalizing = True
        try:
            self._worker.stop()
        finally:
            self._is_closing.set()
            for thread in self._threads:
                thread.join(FINALIZE_S)  # a question to a server that is going away may never be answered

    def _watch_server(self) -> None:
        drained: concurrent.futures.Future[None] | None = None
        exit_at = let_go_by = math.inf
        while not self._is_closing.wait(WATCH_S):
            if os.getppid() != self._server_pid:
                # the server was killed: nobody else would end this process, which holds the device's memory
                os._exit(EXIT_ORPHANED)
            now = time.monotonic()
            if drained is None and self._stop_signal is not None and self._stop_signal.has_come():
                drained = self._worker.begin_stop()
                exit_at = now + self._worker.stop_limit_s + LET_GO_S
            if drained is not None and drained.done():
                let_go_by = min(let_go_by, now + LET_GO_S)
            if now > exit_at or (now > let_go_by and not self._is_finalizing):
                # an answer was lost on its way: Triton waits for the last one, or this side for Triton
                logger.error("the server does not let the model go: ending its process")
                os._exit(EXIT_STUCK)

    def _watch_clients(self) -> None:
        ask_all_at = publish_at = time.monotonic()
        while not self._is_closing.is_set():
            self._worker.wait_for_step(WATCH_S)
            began = time.monotonic()
            has_waited = began >= ask_all_at
            if has_waited:
                ask_all_at = began + WATCH_S
            try:
                self._worker.cancel_abandoned(is_batch_only=not has_waited)
                asking_s = time.monotonic() - began
                if began >= publish_at:
                    publish_at = began + PUBLISH_S
                    self._metrics.publish(self._worker.status(), self._worker.calls)
            except Exception:
                logger.exception("watching the requests failed")
                asking_s = WATCH_S
            self._is_closing.wait(min(PAUSE_TO_ASKING * asking_s, WATCH_S))


def device_of(config: WorkerConfig, args: Mapping[str, str]) -> str:
    """The instance's own GPU where there is one, unless the configuration says otherwise; else what the configuration
    says, to be resolved.

    Raises ConfigError for an instance on a GPU whose torch cannot use it: it would be slow for a reason nobody sees.
    """
    if config.device not in (AUTO_DEVICE, "cuda"):
        return config.device
    kind = args["model_instance_kind"]
    is_on_gpu = kind == "GPU"
    if not torch.cuda.is_available() and (config.device == "cuda" or is_on_gpu):
        raise ConfigError(
            f"config.pbtxt: parameter device is {config.device!r}, the instance is of kind {kind}, and torch finds "
            "no GPU: install a torch with CUDA, or set device to cpu"
        )
    return f"cuda:{args['model_instance_device_id']}" if is_on_gpu else config.device
