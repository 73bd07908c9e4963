"""What a child of `service.workers` runs: the engine, or one of the processes that answer HTTP.

The command line says which; the first line of standard input has the settings. The input ends when the supervisor
does, and then so does this process. A supervisor that stops its children in good order says so in a second line.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nsm_core.engine.stream_pace import MAX_INTERVAL_S
from nsm_core.errors import CheckpointError, ConfigError, NsmError
from nsm_core.heap import freeze_objects, pause_collection
from nsm_core.stage_times import StageTimes
from nsm_core.torch_import import import_torch
from service.lifecycle.hang_watch import HangWatch
from service.lifecycle.lifecycle import WORKER_END_S
from service.lifecycle.pulse import SAMPLE_S, Pulse
from service.lifecycle.start_report import StartReporter
from service.local_model import begin_on_device, limit_threads_and_memory
from service.settings import Settings
from service.telemetry.logs import configure_logging

if TYPE_CHECKING:
    from service.backends.base import InferenceBackend
    from service.backends.process.server import EngineServer

logger = logging.getLogger("nsm.workers")

EXIT_CONFIG = 78  # EX_CONFIG
# A launch of an engine's step lets the interpreter go several times. The loop may hold it so long each time, by default
# 5 ms: as long as ten steps of a GPU.
SWITCH_S = 0.0005


def main() -> None:
    given = json.loads(sys.stdin.readline())
    settings = Settings(**given["settings"])
    times = StageTimes(given["started_at"])
    times.ended("imports")
    configure_logging(settings.log_level, settings.log_format)
    pause_collection()
    limit_threads_and_memory()
    reporter = StartReporter(given["report_fd"])
    try:
        if sys.argv[1] == "engine":
            _run_engine(settings, given, reporter, times)
        else:
            _run_worker(settings, given, reporter)
    except Exception as error:
        has_started = reporter.has_reported
        reporter.failed(error, is_final=isinstance(error, ConfigError | CheckpointError))  # a store may come back
        if isinstance(error, NsmError) and not has_started:
            sys.exit(EXIT_CONFIG)  # the supervisor has the line, which needs no traceback
        raise


def _run_worker(settings: Settings, given: dict[str, Any], reporter: StartReporter) -> None:
    # imported here: the engine's process needs no web framework, and waits for nothing that it does not need
    from service.backends.process.backend import EngineIndex, ProcessBackend
    from service.backends.process.devices import DevicesBackend
    from service.server import Supervision, run_gateway

    is_orphan = threading.Event()
    threading.Thread(target=_end_with_supervisor, args=(is_orphan,), daemon=True).start()

    def make(settings: Settings) -> InferenceBackend:
        engines = [
            (
                device,
                ProcessBackend(
                    Path(path),
                    max_interval_s=MAX_INTERVAL_S,
                    reports_engine=given["number"] == 0,
                    index=EngineIndex(number, len(given["engines"])),
                ),
            )
            for number, (device, path) in enumerate(given["engines"])
        ]
        return engines[0][1] if len(engines) == 1 else DevicesBackend(engines)

    with socket.socket(fileno=given["http_fd"]) as sock:
        supervision = Supervision(
            is_announced=given["number"] == 0,
            is_stop_logged=False,
            started=reporter.ready,
            alive=Pulse(given["pulse_fd"]).beating,
            is_over=is_orphan.is_set,
        )
        run_gateway(settings, sock, make, supervision)


def _end_with_supervisor(is_orphan: threading.Event) -> None:
    """A server whose supervisor was killed has crashed: it waits for no turn, and the next server continues them."""
    if not sys.stdin.read():
        logger.error("the supervisor has ended: this process ends too and leaves its turns to be continued")
        is_orphan.set()
    os.kill(os.getpid(), signal.SIGTERM)


def _run_engine(settings: Settings, given: dict[str, Any], reporter: StartReporter, times: StageTimes) -> None:
    """Signals are for the supervisor. This process ends after the workers: their turns finish, or are handed over."""
    begin_on_device(settings)
    import_torch()
    import uvicorn

    from service.backends.process.server import EngineServer, refuse
    from service.local_model import make_local_backend

    times.ended("torch")

    for sig in (signal.SIGINT, signal.SIGTERM):
        signal.signal(sig, signal.SIG_IGN)
    pulse = Pulse(given["pulse_fd"])
    with socket.socket(fileno=given["engine_fd"]) as sock:
        try:
            backend = make_local_backend(settings, num_engines=given.get("num_engines", 1))
        except NsmError as error:
            reporter.failed(error, is_final=True)  # before the first engine was ready this ends the server
            refuse(sock, error.with_notes())
            raise
        times.ended("model and kernels")

        async def end_after(server: EngineServer) -> None:
            await asyncio.to_thread(sys.stdin.read)
            await server.wait_until_left(within_s=settings.grace_s + WORKER_END_S)

        async def serve() -> None:
            await backend.start()
            server = EngineServer(backend)
            await server.serve(sock)
            reporter.ready()
            times.ended("engine")
            logging.getLogger("nsm.engine").info("the engine is ready after %.1f s: %s", times.seconds, times)
            freeze_objects()
            sys.setswitchinterval(SWITCH_S)
            watch = HangWatch()
            ended = asyncio.create_task(end_after(server))
            while not ended.done() and backend.is_alive():
                pulse.beat()
                watch.read(backend.stats().heartbeat_age_s)
                await asyncio.wait((ended,), timeout=SAMPLE_S)
            await backend.stop()
            watch.close()
            await server.stop()

        with asyncio.Runner(loop_factory=uvicorn.Config(app="").get_loop_factory()) as runner:
            runner.run(serve())
        if not backend.is_alive():
            os._exit(1)


if __name__ == "__main__":
    main()
