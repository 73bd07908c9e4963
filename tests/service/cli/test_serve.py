from __future__ import annotations

import contextlib
import json
import re
import shutil
import signal
import socket
import sqlite3
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.main import get_command

from nsm_core.execution.names import EXECUTOR_NAMES
from service.cli.commands import app
from service.settings import STORES, Settings, shown_default
from tests.service.cli.conftest import NSM, Nsm, assert_one_line, id_of, no_model
from tests.support.rwkv7_files import WRITERS, model_tensors


def test_the_first_line_names_the_model_before_anything_is_loaded(
    nsm: Nsm, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("service.server.run", lambda settings: None)
    with caplog.at_level("INFO", logger="nsm.server"):
        assert nsm("serve", "--model", "pulse-books", "--device", "cpu").exit_code == 0
    assert caplog.messages == ["starting with pulse-books on device cpu"]


def test_every_setting_is_an_option_that_shows_its_default() -> None:
    options = {option.name: option for option in get_command(app).commands["serve"].params}
    assert [name for name in options if name != "help"] == list(Settings.model_fields)
    for name, field in Settings.model_fields.items():
        assert options[name].help == f"{field.description}  [default: {shown_default(name)}]"


def test_help_cuts_no_name_and_no_summary_on_a_narrow_terminal(nsm: Nsm) -> None:
    shown = nsm("serve", "--help", COLUMNS="80").stdout
    names = [f"--{name.replace('_', '-')}" for name in Settings.model_fields]
    assert [name for name in names if not re.search(rf"^  {name} ", shown, re.MULTILINE)] == []
    summaries = nsm("sessions", "--help", COLUMNS="80").stdout.partition("Commands:")[2]
    assert "migrate" in summaries
    assert "..." not in summaries


def test_executor_option_lists_every_executor(nsm: Nsm) -> None:
    result = nsm("serve", "--help", COLUMNS="300")
    assert f"[{'|'.join(EXECUTOR_NAMES)}]" in result.output


def test_options_win_over_variables(nsm: Nsm, monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[Settings] = []
    monkeypatch.setattr("service.server.run", served.append)
    variables = {"NSM_PORT": "1", "NSM_QUEUE_LIMIT": "3", "NSM_LOG_PROMPTS": "true"}
    assert nsm("serve", "--port", 2, "--grace-s", 1.5, "--no-log-prompts", **variables).exit_code == 0
    assert (served[0].port, served[0].queue_limit, served[0].grace_s) == (2, 3, 1.5)
    assert not served[0].log_prompts


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--port", "80x", "NSM_PORT (--port): must be an integer, got '80x'"),
        ("--grace-s", "soon", "NSM_GRACE_S (--grace-s): must be a number, got 'soon'"),
        ("--port", 70000, "NSM_PORT (--port): must be at most 65535, got '70000'"),
        (
            "--store",
            "tape",
            f"NSM_STORE (--store): must be one of {', '.join(STORES)}, got 'tape'",
        ),
        ("--model", "/no/such", f"{no_model('/no/such')} (set by NSM_MODEL or --model)"),
        (
            "--token-budget",
            3,
            "NSM_TOKEN_BUDGET (--token-budget): must be at least the 16 of NSM_MAX_SLOTS (--max-slots), "
            "every row decodes one token a step; got '3'",
        ),
    ],
)
def test_a_bad_setting_is_one_line(
    nsm: Nsm, monkeypatch: pytest.MonkeyPatch, option: str, value: object, message: str
) -> None:
    result = nsm("serve", "--port", 0, option, value, NSM_MAX_SLOTS="16")
    assert_one_line(result, message)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--executor", "cuda"),
        ("--api-keys-file", "/no/such"),
        ("--data-dir", "/proc/no-such"),
        ("--store", "sqlite:////proc/no-such/x.db"),
        ("--host", "192.0.2.1"),
        ("--model", "/proc"),
    ],
)
def test_X17_start_that_fails_names_the_setting_in_one_line(
    nsm: Nsm, monkeypatch: pytest.MonkeyPatch, option: str, value: str
) -> None:
    result = nsm("serve", "--port", 0, option, value)
    assert result.exit_code == 1
    assert result.stderr.count("\n") == 1
    assert f"NSM_{option[2:].upper().replace('-', '_')}" in result.stderr
    assert option in result.stderr


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("option", "value", "reason"),
    [
        ("--api-keys-file", "/no/such", "/no/such"),
        ("--data-dir", "/proc/no-such", "/proc"),
        ("--data-dir", "foreign", "sessions.db"),
        ("--store", "redis://127.0.0.1:1", "127.0.0.1:1"),
    ],
)
def test_file_or_store_that_cannot_be_used_is_told_before_the_model_is_loaded(
    nsm: Nsm,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    option: str,
    value: str,
    reason: str,
    workers: int,
) -> None:
    monkeypatch.setattr("service.server.run_gateway", lambda *parts: pytest.fail("loads the model"))
    monkeypatch.setattr("service.workers.run_workers", lambda *parts: pytest.fail("starts the engine"))
    if value == "foreign":
        with contextlib.closing(sqlite3.connect(tmp_path / "sessions.db")) as database:
            database.execute("CREATE TABLE of_another_program (x)")
        value = str(tmp_path)
    result = nsm("serve", "--port", 0, "--workers", workers, option, value)
    assert result.exit_code == 1
    assert result.stderr.count("\n") == 1
    assert reason in result.stderr
    assert option in result.stderr


def test_prefix_cache_beyond_the_memory_of_the_control_group_is_told_before_the_model_is_loaded(
    nsm: Nsm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.server.run_gateway", lambda *parts: None)
    monkeypatch.setattr("service.server.max_memory_bytes", lambda: 512 * 2**20)
    assert nsm("serve", "--port", 0, "--prefix-cache-mb", 400).exit_code == 0
    result = nsm("serve", "--port", 0, "--prefix-cache-mb", 500)
    start = "NSM_PREFIX_CACHE_MB (--prefix-cache-mb) is 500 of the 512 MB that this control group may use"
    assert_one_line(result, f"{start}; 96 must be left: lower it, or raise the group's limit")


def test_X17_executor_without_its_gpu_does_not_blame_the_device(nsm: Nsm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nsm_core.execution.devices.gpu_missing_reason", lambda index=0: "torch finds no GPU")
    message = "the executor cuda needs a GPU: torch finds no GPU (set by NSM_EXECUTOR or --executor)"
    assert_one_line(nsm("serve", "--port", 0, "--executor", "cuda"), message)


@pytest.mark.parametrize("architecture", ["rwkv7", "nsm"])
def test_X17_weight_that_is_not_finite_names_file_and_tensor_and_no_executor(
    nsm: Nsm, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model_dir: Path, architecture: str
) -> None:
    if architecture == "rwkv7":
        tensors, name = dict(model_tensors()), "blocks.0.ffn.key.weight"
        tensors[name] = torch.full_like(tensors[name], torch.nan)
        path = file = WRITERS["pth"](tmp_path, tensors)
    else:
        path = Path(shutil.copytree(model_dir, tmp_path / "model"))
        file = path / "weights.safetensors"
        tensors, name = load_file(file), "embedding.weight"
        tensors[name] = torch.full_like(tensors[name], torch.nan)
        save_file(tensors, file)
    result = nsm("serve", "--port", 0, "--model", path)
    assert result.exit_code == 1
    assert result.stderr.startswith(f"nsm: {file}: the tensor {name} holds a number that is not finite")
    assert "EXECUTOR" not in result.stderr


def test_X17_more_slots_than_memory_names_the_setting(nsm: Nsm, monkeypatch: pytest.MonkeyPatch) -> None:
    result = nsm("serve", "--port", 0, "--max-slots", 10**11, "--token-budget", 10**11)
    assert result.exit_code == 1
    assert re.fullmatch(
        r"nsm: NSM_MAX_SLOTS \(--max-slots\) is too large: no memory for the states of 100000000000 slots, about "
        r"[\d.]+ GiB\n",
        result.stderr,
    )


def test_a_port_in_use_is_one_line(nsm: Nsm, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = nsm("serve", "--port", port)
    assert_one_line(result, f"port {port} on 127.0.0.1 is already in use; choose another with --port or NSM_PORT")


@pytest.fixture
def server() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`nsm serve` on a free port, and its start line."""
    command = [*NSM, "serve", "--port", "0", "--grace-s", "1"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            yield process, next(line for line in process.stderr if " serving " in line)
        finally:
            process.kill()


def test_start_line_names_the_model_and_chat_and_server_share_sessions(
    nsm: Nsm, data_dir: Path, server: tuple[subprocess.Popen[str], str]
) -> None:
    process, line = server
    found = re.search(
        r" serving tiny on (http://127\.0\.0\.1:\d+) with sessions in (\S+), computed as \S+, documentation at (\S+)\n",
        line,
    )
    assert found is not None, line
    url = found[1]
    assert found[2] == str(data_dir / "sessions.db")
    session_id = id_of(nsm("chat", "--seed", 5, "--max-tokens", 4, stdin="Hello").stderr)
    position = json.loads(nsm("sessions", "show", session_id, "--json").stdout)["position"]
    with httpx.Client(base_url=url, timeout=60.0) as client:
        assert client.get(found[3]).status_code == 200
        body = {"input": " and then", "max_tokens": 4}
        answer: dict[str, Any] = client.post(f"/v1/sessions/{session_id}/generate", json=body).json()
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == position
    assert answer["session"]["version"] == 2
    back = nsm("chat", "--session", session_id, "--max-tokens", 4, stdin="Good night.")
    assert back.stderr.startswith(f"session {session_id} at position {answer['session']['position']}, version 2")
    assert json.loads(nsm("sessions", "show", session_id, "--json").stdout)["version"] == 3
    process.send_signal(signal.SIGINT)
    assert process.wait() == 0
