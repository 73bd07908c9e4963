from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from nsm_core.errors import CheckpointError, ConfigError, StoreUnavailable
from nsm_core.model.bundled import find_checkpoint
from service.addresses import is_loopback
from service.app import create_app
from service.backends.base import InferenceBackend
from service.server import bind, make_backend, other_models, require_keys, run, run_gateway, serve, uvicorn_config
from service.settings import Settings, load_settings
from service.stores.sessions.factory import make_store
from service.stores.sessions.sqlite import SqliteSessionStore
from tests.support.fakes import DEFAULT_SCRIPT, FakeBackend
from tests.support.gateway import frames_of, until

REPOSITORY = Path(__file__).parents[2]
PATH = "/v1/completions"


@contextlib.asynccontextmanager
async def served(backend: FakeBackend, **settings: Any) -> AsyncIterator[tuple[asyncio.Task[None], httpx.AsyncClient]]:
    """The server as `run` has it, in the test's own loop and thread, so that real signals reach it."""
    app = create_app(Settings(data_dir=Path("unused"), port=0, **settings), backend, SqliteSessionStore(None))
    with bind("127.0.0.1", 0) as sock:
        host, port = sock.getsockname()
        task = asyncio.create_task(serve(app, uvicorn_config(app), sock))
        async with httpx.AsyncClient(base_url=f"http://{host}:{port}", timeout=30) as client:
            await until(lambda: _is_listening(sock))
            try:
                yield task, client
            finally:
                backend.release_all()
                if not task.done():
                    os.kill(os.getpid(), signal.SIGTERM)
                await asyncio.wait_for(task, 60)


def _is_listening(sock: socket.socket) -> bool:
    return bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGINT])
async def test_an_idle_server_stops_at_once(sig: signal.Signals) -> None:
    async with served(FakeBackend()) as (task, client):
        assert (await client.get("/health")).status_code == 200
        os.kill(os.getpid(), sig)
        await asyncio.wait_for(task, 60)


async def test_the_start_line_is_logged_when_connections_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    listening: list[bool] = []

    def note(_message: str, line: str = "") -> None:
        found = re.match(r"serving fake-nsm on http://127\.0\.0\.1:(\d+)", line)
        if found:
            with socket.socket() as probe:
                listening.append(probe.connect_ex(("127.0.0.1", int(found[1]))) == 0)

    monkeypatch.setattr("service.server.logger.info", note)
    async with served(FakeBackend()):
        pass
    assert listening == [True]


async def test_T7_running_streams_finish_and_new_work_is_refused() -> None:
    backend = FakeBackend(hold=True)
    async with served(backend) as (task, client):
        stream = asyncio.create_task(client.post(PATH, json={"prompt": "x", "stream": True, "max_tokens": 50}))
        await until(lambda: len(backend.running) == 1)
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(0)
        ready = await client.get("/health/ready")
        assert (ready.status_code, ready.json()["checks"]["accepting"]) == (503, False)
        refused = await client.post(PATH, json={"prompt": "y"})
        assert (refused.status_code, refused.headers["connection"]) == (503, "close")
        assert refused.headers["retry-after"] == "1"
        assert refused.json()["error"]["code"] == "server_stopping"
        assert "x-should-retry" not in refused.headers  # stock clients try again, at another replica
        backend.release(50)
        frames = frames_of((await stream).text)
        assert "".join(frame["choices"][0]["text"] for frame in frames) == DEFAULT_SCRIPT
        await asyncio.wait_for(task, 60)


async def test_unfinished_request_is_aborted_with_a_final_frame() -> None:
    backend = FakeBackend(hold=True)
    async with served(backend, grace_s=0.05) as (task, client):
        stream = asyncio.create_task(client.post(PATH, json={"prompt": "x", "stream": True}))
        messages = [{"role": "user", "content": "x"}]
        chat = asyncio.create_task(
            client.post("/v1/chat/completions", json={"messages": messages, "stream": True, "max_tokens": 9})
        )
        whole = asyncio.create_task(client.post(PATH, json={"prompt": "y"}))
        created = await client.post("/v1/sessions", json={"id": "s1"})
        assert created.status_code == 200
        turn = asyncio.create_task(client.post("/v1/sessions/s1/generate", json={"input": "z", "stream": True}))
        await until(lambda: len(backend.running) == 4)
        os.kill(os.getpid(), signal.SIGTERM)
        for answer in (await stream, await chat, await turn):
            error = frames_of(answer.text)[-1]["error"]
            assert (error["type"], error["code"]) == ("server_error", "server_stopping")
            assert answer.text.endswith("data: [DONE]\n\n")
        assert (await whole).status_code == 503
        assert (await whole).headers["retry-after"] == "1"
        assert (await whole).json()["error"]["code"] == "server_stopping"
        await asyncio.wait_for(task, 60)


async def test_a_second_sigterm_changes_nothing() -> None:
    backend = FakeBackend(hold=True)
    async with served(backend) as (task, client):
        whole = asyncio.create_task(client.post(PATH, json={"prompt": "y", "max_tokens": 3}))
        await until(lambda: len(backend.running) == 1)
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(0)
        backend.release(3)
        assert (await whole).json()["choices"][0]["text"] == "It was the"
        await asyncio.wait_for(task, 60)


async def test_a_second_interrupt_ends_the_process_at_once() -> None:
    script = textwrap.dedent(
        """
        import asyncio, os, signal
        from pathlib import Path
        from service.app import create_app
        from service.server import bind, serve, uvicorn_config
        from service.telemetry.logs import configure_logging
        from service.stores.sessions.sqlite import SqliteSessionStore
        from service.settings import Settings
        from tests.support.fakes import FakeBackend

        async def main():
            configure_logging("info")
            app = create_app(Settings(data_dir=Path("unused")), FakeBackend(), SqliteSessionStore(None))
            with bind("127.0.0.1", 0) as sock, app.state.services.lifecycle.track():  # something always runs
                await serve(app, uvicorn_config(app), sock)

        asyncio.run(main())
        """
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", script, cwd=REPOSITORY, stderr=asyncio.subprocess.PIPE
    )
    assert process.stderr is not None
    line = await _read_line(process.stderr, b"serving fake-nsm")
    found = re.search(rb"http://127\.0\.0\.1:(\d+)", line)
    assert found
    with socket.create_connection(("127.0.0.1", int(found[1]))):
        pass  # whoever has read the line may connect
    process.send_signal(signal.SIGINT)
    await _read_line(process.stderr, b"stopping")
    process.send_signal(signal.SIGINT)
    await _read_line(process.stderr, b"second Ctrl+C")
    assert await asyncio.wait_for(process.wait(), 60) == 130


async def _read_line(log: asyncio.StreamReader, words: bytes) -> bytes:
    async with asyncio.timeout(60):
        async for line in log:
            if words in line:
                return line
    raise AssertionError(f"the process ended without saying {words!r}")


def test_a_port_in_use_is_one_clear_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError) as caught:
            run(Settings(port=port))
    assert str(caught.value) == f"port {port} on 127.0.0.1 is already in use; choose another with --port or NSM_PORT"


def test_a_missing_model_is_told_before_a_taken_port(tmp_path: Path) -> None:
    missing = tmp_path / "nothing"
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(CheckpointError, match=f"no model {missing}"):
        run(Settings(port=taken.getsockname()[1], model=missing))


def test_a_port_taken_while_the_model_was_loading() -> None:
    """On the event loop of the server: uvloop's own call to listen does not fail."""
    app = create_app(Settings(), FakeBackend(), SqliteSessionStore(None))
    config = uvicorn_config(app)
    with bind("127.0.0.1", 0) as sock, bind("127.0.0.1", sock.getsockname()[1]) as other:
        other.listen()
        taken = pytest.raises(ConfigError, match=rf"^port {other.getsockname()[1]} on 127.0.0.1 is already in use")
        with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner, taken:
            runner.run(serve(app, config, sock))


@pytest.mark.parametrize("host", ["not a host name", "203.0.113.1"])
def test_an_address_that_is_not_ours(host: str) -> None:
    with pytest.raises(ConfigError, match=f"cannot listen on {host} port 0: "):
        bind(host, 0)


def test_a_restart_can_listen_on_the_same_port_at_once() -> None:
    with bind("127.0.0.1", 0) as sock:
        sock.listen()
        port = sock.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client, contextlib.closing(sock.accept()[0]):
            client.sendall(b"x")
    bind("127.0.0.1", port).close()


async def test_errors_of_the_start_are_raised() -> None:
    class BrokenStore(SqliteSessionStore):
        async def open(self) -> None:
            raise StoreUnavailable("the disk is gone")

    app = create_app(Settings(), FakeBackend(), BrokenStore(None))
    with bind("127.0.0.1", 0) as sock, pytest.raises(StoreUnavailable, match="the disk is gone"):
        await serve(app, uvicorn_config(app), sock)


def test_the_store_is_the_one_the_settings_name(tmp_path: Path) -> None:
    assert isinstance(make_store(Settings(store="memory")), SqliteSessionStore)
    assert isinstance(make_store(Settings(data_dir=tmp_path)), SqliteSessionStore)


def test_a_model_that_is_not_there_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises((CheckpointError, ConfigError), match=str(tmp_path)):
        make_backend(Settings(model=tmp_path / "none"))


def test_with_triton_a_named_model_is_read_for_its_fingerprint_alone(tmp_path: Path) -> None:
    assert not make_backend(Settings(triton_url="127.0.0.1:1")).is_ready()
    with pytest.raises((CheckpointError, ConfigError), match=str(tmp_path)):
        make_backend(Settings(triton_url="127.0.0.1:1", model=tmp_path / "none"))


def test_the_application_needs_no_torch_and_a_server_no_redis() -> None:
    """Each is imported where the backend, or the store, needs it."""
    code = "import sys, service.server; sys.exit(bool({'torch', 'redis'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, check=False).returncode == 0


@pytest.mark.parametrize("module", ["service.worker_process", "service.server"])
def test_an_engines_process_and_a_supervisor_need_no_web_framework(module: str) -> None:
    """It would be a third of what they wait for at a start."""
    code = f"import sys, {module}; sys.exit(bool({{'torch', 'fastapi', 'service.app'}} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, check=False).returncode == 0


# ---- who may reach it ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("127.0.0.1", True),
        ("127.8.9.1", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("0.0.0.0", False),
        ("::", False),
        ("192.168.0.2", False),
        ("fe80::1%eth0", False),
        ("::ffff:10.0.0.1", False),
    ],
)
def test_which_addresses_only_this_machine_reaches(address: str, expected: bool) -> None:
    assert is_loopback(address) is expected


def test_other_hosts_without_keys_need_allow_anonymous(tmp_path: Path) -> None:
    with bind("0.0.0.0", 0) as everywhere, bind("localhost", 0) as here:
        with pytest.raises(ConfigError, match=r"not 0\.0\.0\.0; .*NSM_API_KEYS_FILE.*NSM_ALLOW_ANONYMOUS=true"):
            require_keys(Settings(host="0.0.0.0"), everywhere)
        require_keys(Settings(host="0.0.0.0", allow_anonymous=True), everywhere)
        require_keys(Settings(host="0.0.0.0", api_keys_file=tmp_path / "keys.toml"), everywhere)
        require_keys(Settings(host="localhost"), here)


def test_a_model_that_is_given_twice_is_refused_before_one_is_loaded() -> None:
    def make(settings: Settings) -> InferenceBackend:
        raise AssertionError("the model is loaded")

    settings = load_settings(model="pulse-books", models="again=pulse-books", store="memory", port=0)
    with (
        bind("127.0.0.1", 0) as sock,
        pytest.raises(ConfigError, match="'again' is given twice, also as 'pulse-books'"),
    ):
        run_gateway(settings, sock, make)


def test_a_further_model_whose_files_are_gone_names_the_setting_of_further_models(tmp_path: Path) -> None:
    directory = tmp_path / "later"
    shutil.copytree(find_checkpoint(Path("pulse-books-small")), directory)
    settings = load_settings(model="pulse-books", models=str(directory), store="memory", device="cpu")
    (other,) = other_models(settings)
    shutil.rmtree(directory)
    with pytest.raises(CheckpointError) as caught:
        other.load()
    assert caught.value.with_notes().endswith("(set by NSM_MODELS or --model)")
