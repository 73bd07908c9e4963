from __future__ import annotations

import http.server
import io
import os
import pty
import re
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from rich.console import Console

from service.cli import top as top_module
from service.cli.scrape import Interval, Scrape
from service.cli.top import Watch
from service.cli.top_view import render
from tests.service.cli.conftest import NSM, Nsm, assert_one_line
from tests.support.tenants import make_key, write_keys

REPOSITORY = Path(__file__).resolve().parents[3]
KEY, READER = make_key("acme"), make_key("ops", metrics=True)
INFO = '# TYPE nsm_model_info gauge\nnsm_model_info{model_name="tiny"} 1.0\n'


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Iterator[str]:
    """A real server that has keys."""
    directory = tmp_path_factory.mktemp("watched")
    settings = {
        "NSM_API_KEYS_FILE": write_keys(directory / "keys.toml", KEY, READER, acme="max_sessions = 10", ops=""),
        "NSM_MODEL": model_dir,
        "NSM_DATA_DIR": directory / "data",
        "NSM_NUM_THREADS": 1,
        "NSM_GRACE_S": 1,
        "NSM_PORT": 0,
    }
    environ = {**os.environ, **{name: str(value) for name, value in settings.items()}}
    with subprocess.Popen([*NSM, "serve"], stderr=subprocess.PIPE, text=True, env=environ, cwd=REPOSITORY) as server:
        try:
            yield url_of(server)
        finally:
            server.kill()


def url_of(server: subprocess.Popen[str]) -> str:
    assert server.stderr is not None
    for line in server.stderr:
        found = re.search(r"serving tiny on (\S+)", line)
        if found:
            return found[1]
    raise RuntimeError("the server did not start")


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "key"
    path.write_text(READER.text + "\n")
    return path


def during_the_interval(monkeypatch: pytest.MonkeyPatch, *happenings: Callable[[], object]) -> None:
    """Instead of the pauses between frames, one after the other."""
    left = iter(happenings)
    monkeypatch.setattr(top_module.time, "sleep", lambda seconds: next(left)())


def row(frame: str, name: str) -> str:
    """What stands beside a name."""
    found = re.search(rf"│{re.escape(name)} +(.*?) *│", frame)
    assert found is not None, frame
    return found[1]


def leave() -> None:
    raise KeyboardInterrupt


def three_turns(url: str) -> None:
    with httpx.Client(base_url=url, headers=KEY.headers, timeout=60.0) as client:
        assert client.post("/v1/sessions", json={"id": "s"}).status_code == 200
        for _ in range(3):
            body = {"input": "Hello", "max_tokens": 6, "ignore_eos": True}
            assert client.post("/v1/sessions/s/generate", json=body).status_code == 200
        assert client.get("/v1/models", headers={"authorization": "Bearer nobody"}).status_code == 401


def test_frame_shows_the_interval_and_needs_a_key_for_metrics(
    nsm: Nsm, url: str, key_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    during_the_interval(monkeypatch, lambda: three_turns(url), lambda: None, lambda: None, leave)
    frame = nsm("top", "--url", url, "--once", "--key-file", key_file).stdout
    assert frame.startswith(f"tiny at {url} ")
    assert row(frame, "slots").endswith("0 of 16")
    assert float(row(frame, "turns committed/s")) > 0
    assert float(row(frame, "states used as stored/s")) > 0
    assert float(row(frame, "refused/s")) > 0
    assert float(row(frame, "tokens in a step")) >= 1
    assert row(frame, "made again, or not usable/s") == "0"
    assert re.fullmatch(r"[1-9]\d\.\d%", row(frame, "prompt tokens not computed"))
    for name in ("queue", "prefill", "first token", "next token", "end to end", "state read", "state commit"):
        assert re.fullmatch(r"([\d.]+ m?s +){2}[\d.]+ m?s", row(frame, name)), name
    followed = nsm("top", "--url", url, "--key-file", key_file)
    assert (followed.exit_code, followed.stdout.count(f"tiny at {url} ")) == (0, 2)

    other = tmp_path / "other"
    other.write_text(KEY.text)
    message = f"{url} wants an API key that may read metrics: --key-file (nsm keys new --metrics makes one)"
    assert_one_line(nsm("top", "--url", url, "--once"), message)
    assert_one_line(nsm("top", "--url", url, "--once", "--key-file", other), message)


def test_on_a_terminal_the_screen_changes_until_ctrl_c(url: str, key_file: Path) -> None:
    ours, theirs = pty.openpty()
    command = [*NSM, "top", "--url", url, "--interval", "0.1", "--key-file", str(key_file)]
    with subprocess.Popen(command, stdout=theirs, stderr=theirs, env={**os.environ, "TERM": "xterm"}) as process:
        os.close(theirs)
        screen = b""
        while screen.count(b"tiny at ") < 3:
            screen += os.read(ours, 65536)
        process.send_signal(signal.SIGINT)
        with_end = screen + _rest(ours)
        assert process.wait() == 0
    assert b"\x1b[?1049h" in screen  # a screen of its own
    assert b"\x1b[?1049l" in with_end  # and the old one afterwards
    assert b"Traceback" not in with_end


def _rest(terminal: int) -> bytes:
    text = b""
    try:
        while part := os.read(terminal, 65536):
            text += part
    except OSError:  # Linux's way to say that nobody writes there any more
        pass
    os.close(terminal)
    return text


def test_lost_server_is_reported_and_the_last_numbers_stay() -> None:
    scrape = Scrape(INFO + "# TYPE nsm_max_slots gauge\nnsm_max_slots 7.0\n", at=0.0)
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(render(Interval(scrape, scrape), "http://x", "http://x does not answer\x1b[2J"))
    frame = console.export_text()
    assert "http://x does not answer\ufffd[2J" in frame
    assert row(frame, "slots").endswith("– of 7")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"# TYPE up gauge\nup 1.0\n", "has metrics, but not those of a server of this kind"),
        (b"<html>what is this</html>", "does not answer with metrics: "),
    ],
    ids=["another server's metrics", "a page"],
)
def test_another_program_on_the_port_is_an_error_of_one_line(nsm: Nsm, body: bytes, message: str) -> None:
    class Other(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            """The test's output stays clean."""

    with http.server.HTTPServer(("127.0.0.1", 0), Other) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            result = nsm("top", "--once", "--url", f"http://127.0.0.1:{server.server_port}")
        finally:
            server.shutdown()
            thread.join()
    assert result.exit_code == 1
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_unreachable_server_is_named_in_one_line(nsm: Nsm) -> None:
    result = nsm("top", "--once", NSM_PORT="1")
    assert result.stderr.startswith("nsm: http://127.0.0.1:1 does not answer with metrics: ")
    assert result.exit_code == 1


def test_only_http_is_asked(nsm: Nsm) -> None:
    result = nsm("top", "--once", "--url", "file:///etc/passwd")
    assert result.exit_code == 2
    assert "must begin with http:// or https://" in result.stderr


def test_rates_cover_the_window_only(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([Scrape(INFO, at=float(at)) for at in (0, 10, 20, 30, 40, 50)])
    monkeypatch.setattr(top_module, "scrape", lambda url, key: next(answers))
    watch = Watch("http://x", None)
    assert [watch.sample().seconds for _ in range(5)] == [10, 20, 30, 30, 30]
