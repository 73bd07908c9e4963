"""Runs the application under uvicorn, from loading to a graceful stop."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import functools
import logging
import os
import signal
import socket
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, cast

import uvicorn

from nsm_core.control_group import max_memory_bytes
from nsm_core.engine.stream_pace import MAX_INTERVAL_S
from nsm_core.errors import ConfigError, NsmError
from nsm_core.heap import freeze_objects
from nsm_core.model.bundled import find_checkpoint, no_model
from service.addresses import is_loopback
from service.lifecycle.lifecycle import EXIT_INTERRUPTED, FINAL_FRAMES_S, INTERRUPTED
from service.local_model import limit_threads_and_memory, make_local_backend
from service.settings import Settings, is_tracing_on, label, naming
from service.state.other_model import other_model
from service.stores.prefixes.factory import make_prefix_store
from service.stores.sessions.base import DEFAULT_TENANT
from service.stores.sessions.factory import make_store
from service.telemetry.tracing.tracing import make_tracing
from service.tenants.api_keys import KeyFile
from service.web.fastapi_import import importing_fastapi

if TYPE_CHECKING:
    from fastapi import FastAPI

    from service.backends.base import InferenceBackend
    from service.deps import Services
    from service.served_models import OtherModel

logger = logging.getLogger("nsm.server")

MAX_EVENT_BYTES = 2**20  # of one event on a WebSocket
KEEP_ALIVE_S = 75  # above the idle time of common load balancers: they, not we, close idle connections
TRITON_WAIT_S = 60.0  # for a first Triton server to be ready at the start
MB = 2**20
MIN_MEMORY_BYTES = 96 * MB  # a gateway that has not loaded anything yet has 87 MB
NUM_NEWEST = 16  # sessions that a start looks at


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Supervision:
    """Of a process that answers HTTP, by the one that started it. The defaults are those of a process on its own.

    `is_announced`: whether it logs the start line; `is_stop_logged`: that it stops, and that it has. `started`: called
    once connections are accepted. `alive`: around the time in which they are. `is_over`: whether the other process has
    ended, as by `kill -9`: then no turn is waited for.
    """

    is_announced: bool = True
    is_stop_logged: bool = True
    started: Callable[[], None] = lambda: None
    alive: Callable[[], AbstractAsyncContextManager[None]] = contextlib.nullcontext
    is_over: Callable[[], bool] = lambda: False


def run(settings: Settings) -> None:
    """Serves until SIGTERM or SIGINT, then returns. Raises CheckpointError, ConfigError or StoreUnavailable.

    The caller has configured the log.
    """
    limit_threads_and_memory()
    require_model(settings)
    with bind(settings.host, settings.port) as sock:
        require_keys(settings, sock)
        require_files(settings)
        require_memory(settings)
        if settings.num_workers:
            from service.workers import run_workers

            run_workers(settings, sock)
        else:
            run_gateway(settings, sock, make_backend)


def run_gateway(
    settings: Settings,
    sock: socket.socket,
    make: Callable[[Settings], InferenceBackend],
    supervision: Supervision | None = None,
) -> None:
    """One process that answers on `sock`, which is bound, until SIGTERM or SIGINT. Raises as `run`."""
    app = _make_app(settings, make)
    config = uvicorn_config(app)
    with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
        runner.run(serve(app, config, sock, supervision))


def _make_app(settings: Settings, make: Callable[[Settings], InferenceBackend]) -> FastAPI:
    with importing_fastapi():
        from service.app import create_app  # a supervisor of workers needs no web framework

    tracing = make_tracing() if is_tracing_on() else None
    store, prefixes = make_store(settings), make_prefix_store(settings)  # may refuse: before the model is loaded
    others = other_models(settings)  # these too
    backend = make(settings)
    with importing_fastapi():
        return create_app(settings, backend, store, prefixes, tracing, others=others)


async def serve(
    app: FastAPI,
    config: uvicorn.Config,
    sock: socket.socket,
    supervision: Supervision | None = None,
) -> None:
    """The application's whole life; errors of its start are raised, not logged."""
    services: Services = app.state.services
    supervision = supervision or Supervision()
    async with app.router.lifespan_context(app):
        host, port = sock.getsockname()[:2]
        line = start_line(services, f"[{host}]" if ":" in host else host, port) if supervision.is_announced else None
        if supervision.is_announced:
            await warn_of_other_model(services)
        freeze_objects()
        try:
            async with supervision.alive():
                await GracefulServer(config, services, line, supervision).serve(sockets=[sock])
        except OSError as error:  # another process began to listen after we had bound
            raise cannot_listen(host, port, error) from error
    if supervision.is_stop_logged:
        logger.info("stopped")


def start_line(services: Services, host: str, port: int) -> str:
    """The log's line when connections are accepted. The numerics class names the device."""
    url, numerics = f"http://{host}:{port}", services.backend.model.numerics
    sessions = services.settings.store_name()
    return (
        f"serving {services.model_name} on {url} with sessions in {sessions}, computed as {numerics}, "
        f"documentation at {url}/docs"
    )


async def warn_of_other_model(services: Services) -> None:
    """One line where another model made the newest session: so it is after a change of the model.

    Only the newest sessions of the default tenant are read, up to one with a text: a turn warns of any other.
    """
    running, models = services.backend.model.fingerprint, services.models
    with contextlib.suppress(NsmError):
        newest = (await services.store.list(tenant=DEFAULT_TENANT, limit=NUM_NEWEST)).heads
        made_by = next((head.model_fingerprint for head in newest if head.num_log_tokens), running)
        if models.name_of(made_by) is None:
            logger.warning(
                "the newest session was made by model %s, which does not run here: %s",
                *await asyncio.to_thread(other_model, made_by, running),
            )


def other_models(settings: Settings) -> list[OtherModel]:
    """The models that are loaded on demand. Their files are read for their fingerprints alone.

    Raises CheckpointError, or ConfigError for a model or a name that is there twice.
    """
    further = settings.further_models()
    if not further:
        return []
    from nsm_core.architectures import identify
    from nsm_core.model.bundled import find_checkpoint
    from service.served_models import OtherModel

    with naming("model"):
        first, _ = identify(settings.model)
    taken = {first: settings.served_model_name or find_checkpoint(settings.model).resolve().name}
    others = []
    for name, path in further.items():
        with naming("models"):
            fingerprint, _ = identify(path)
            if name in taken.values() or fingerprint in taken:
                raise ConfigError(f"the model {name!r} is given twice, also as {taken.get(fingerprint, name)!r}")
        taken[fingerprint] = name
        own = settings.model_copy(update={"model": path})
        others.append(
            OtherModel(
                name=name,
                fingerprint=fingerprint,
                num_file_bytes=_num_file_bytes(path),
                load=functools.partial(make_local_backend, own, named_by="models"),
            )
        )
    return others


def _num_file_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in ([path] if path.is_file() else path.rglob("*")) if file.is_file())


def make_backend(settings: Settings) -> InferenceBackend:
    """The model in this process, or the Triton servers that have it. Raises CheckpointError or ConfigError."""
    return make_local_backend(settings) if settings.triton_url is None else make_triton_backend(settings)


def make_triton_backend(settings: Settings) -> InferenceBackend:
    """Only a model that the settings name is read, for its fingerprint. Raises CheckpointError or ConfigError."""
    try:
        from service.backends.triton.backend import TritonBackend
        from service.backends.triton.tls import TritonTls
    except ModuleNotFoundError as error:
        raise ConfigError("NSM_TRITON_URL needs the extra: pip install 'nsm-serve[triton]'") from error

    fingerprint = None
    if settings.model is not None:
        from nsm_core.architectures import identify

        with naming("model"):
            fingerprint, _ = identify(settings.model)
    with naming("triton_tls_dir"):
        tls = None if settings.triton_tls_dir is None else TritonTls.read_directory(settings.triton_tls_dir)
    return TritonBackend(
        settings.triton_urls(),
        wait_s=TRITON_WAIT_S,
        fingerprint=fingerprint,
        tls=tls,
        max_interval_s=MAX_INTERVAL_S,
    )


def bind(host: str, port: int) -> socket.socket:
    """Takes the address before the model is loaded; nothing is accepted yet. Raises ConfigError."""
    try:
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = infos[0]
        sock = socket.socket(family, kind, protocol)
    except OSError as error:
        raise cannot_listen(host, port, error) from error
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a restart need not wait for old connections
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise cannot_listen(host, port, error) from error
    return sock


def require_keys(settings: Settings, sock: socket.socket) -> None:
    """Raises ConfigError when other hosts could use the server without a key; `sock` is bound, not yet listening."""
    if settings.api_keys_file is None and not settings.allow_anonymous and not is_loopback(sock.getsockname()[0]):
        raise ConfigError(
            f"without API keys the server serves this machine only, not {settings.host}; name a file of keys with "
            "NSM_API_KEYS_FILE (docs/tenants.md), or let everybody in with NSM_ALLOW_ANONYMOUS=true"
        )


def require_model(settings: Settings) -> None:
    """Raises CheckpointError where the settings name a model that is not here, before anything else is looked at."""
    with naming("model"):
        path = find_checkpoint(settings.model)
        if settings.model is not None and not path.exists():
            raise no_model(path)


def require_files(settings: Settings) -> None:
    """Raises what an unusable file of keys or store raises, before a model is loaded."""
    if settings.api_keys_file is not None:
        with naming("api_keys_file"):
            KeyFile(settings.api_keys_file)
    store = make_store(settings)
    with settings.naming_store:
        asyncio.run(store.check())


def require_memory(settings: Settings) -> None:
    """Raises ConfigError when the prefix cache alone, once full, leaves no memory of the control group to the model."""
    limit, cache = max_memory_bytes(), 0 if settings.is_redis else settings.prefix_cache_mb * MB
    if limit is not None and cache > limit - MIN_MEMORY_BYTES:
        raise ConfigError(
            f"{label('prefix_cache_mb')} is {settings.prefix_cache_mb} of the {limit // MB} MB that this control group "
            f"may use; {MIN_MEMORY_BYTES // MB} must be left: lower it, or raise the group's limit"
        )


def cannot_listen(host: str, port: int, error: OSError) -> ConfigError:
    if error.errno == errno.EADDRINUSE:
        return ConfigError(f"port {port} on {host} is already in use; choose another with --port or NSM_PORT")
    reason = error.strerror or error
    return ConfigError(f"cannot listen on {host} port {port}: {reason}; see --host or NSM_HOST, --port or NSM_PORT")


def uvicorn_config(app: FastAPI) -> uvicorn.Config:
    """uvicorn without its own log, its own environment variables and its own lifespan."""
    from service.web.connection import connection_class
    from service.web.head_limits import RECEIVE_TIMEOUT_S

    return uvicorn.Config(
        app,
        http=connection_class(RECEIVE_TIMEOUT_S),
        ws=cast(type[asyncio.Protocol], open_websocket),
        ws_max_size=MAX_EVENT_BYTES,
        ws_per_message_deflate=False,  # small events; a compressed one may be huge
        lifespan="off",  # `serve` runs it
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        workers=1,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=int(FINAL_FRAMES_S),
    )


def open_websocket(**parts: Any) -> asyncio.Protocol:
    """In place of the protocol's class, whose library a first WebSocket imports."""
    from service.web.websocket import WebSocketConnection

    return WebSocketConnection(**parts)


class GracefulServer(uvicorn.Server):
    """On the first signal: no new work, time for running work to finish, then an orderly abort of the rest.

    uvicorn alone closes its sockets at once, so load balancers would never see that it is not ready.
    Once connections are accepted, `start_line`, if any, is logged.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        services: Services,
        start_line: str | None,
        supervision: Supervision,
    ) -> None:
        super().__init__(config)
        self._services = services
        self._start_line = start_line
        self._supervision = supervision
        self._loop = asyncio.get_running_loop()
        self._stopping: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Raises OSError where another process has begun to listen: uvloop would pass over that."""
        for sock in sockets or []:
            sock.listen(self.config.backlog)
        await super().startup(sockets)
        if self._start_line is not None:
            logger.info("%s", self._start_line)
        self._supervision.started()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The signal handler. A second Ctrl+C ends the process at once: every commit is durable already."""
        if self._services.lifecycle.is_draining:
            if sig == signal.SIGINT:
                logger.warning(INTERRUPTED)
                os._exit(EXIT_INTERRUPTED)
            return
        self._services.lifecycle.begin_drain()
        self._loop.call_soon_threadsafe(self._begin_stop)

    def _begin_stop(self) -> None:
        self._stopping = asyncio.create_task(self._stop())
        self._stopping.add_done_callback(self._exit)

    async def _stop(self) -> None:
        services = self._services
        grace_s = 0.0 if self._supervision.is_over() else services.settings.grace_s
        if self._supervision.is_stop_logged:
            logger.info("stopping: running requests may finish within %g s", grace_s)
        is_idle, _ = await asyncio.gather(
            services.lifecycle.wait_idle(grace_s),
            services.models.on_loaded(lambda served: served.turns.drain(grace_s)),
        )
        if not is_idle:
            logger.warning("aborting requests that did not finish within %g s", grace_s)
        for served in services.models.loaded:
            served.turns.stop_following()
        # running requests end with abort, and their clients get an error frame
        await services.models.on_loaded(lambda served: served.backend.stop())
        await services.lifecycle.wait_idle(FINAL_FRAMES_S)

    def _exit(self, stopping: asyncio.Task[None]) -> None:
        self.should_exit = True
        if not stopping.cancelled() and stopping.exception() is not None:
            logger.error("the graceful stop failed", exc_info=stopping.exception())
