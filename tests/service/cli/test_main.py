from __future__ import annotations

import importlib.metadata
import json
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from nsm_core.tokenizer import Tokenizer
from service.cli.main import app_for, main
from tests.service.cli.conftest import NSM, Nsm, assert_one_line, no_model
from tests.support.rwkv7 import save_rwkv7

COMMANDS = ("serve", "generate", "chat", "sessions", "train", "eval", "bench", "top", "info")


def test_help_lists_every_command(nsm: Nsm) -> None:
    for args in ((), ("--help",)):
        result = nsm(*args)
        assert result.exit_code == 0
        assert all(f" {command} " in result.stdout for command in COMMANDS)


@pytest.mark.parametrize(
    "args",
    [
        ("--help",),
        ("serve", "--help"),
        ("chat", "--help"),
        ("top", "--help"),
        ("bench", "gate", "--help"),
        ("--version",),
        ("bogus",),
    ],
)
def test_command_without_a_model_imports_no_torch(args: tuple[str, ...]) -> None:
    heavy = "{'torch', 'fastapi', 'tokenizers', 'numpy'}"
    program = f"import atexit, sys; atexit.register(lambda: print(sorted({heavy} & set(sys.modules)))); {NSM[-1]}"
    result = subprocess.run([*NSM[:-1], program, *args], capture_output=True, text=True, check=False)
    assert result.stdout.endswith("[]\n"), result.stdout


@pytest.mark.parametrize(
    "args", [("serve", "--help"), ("serve", "--max-slots", "many"), ("serve", "--bogus"), ("serve", "x")]
)
def test_serve_alone_is_the_serve_among_all_commands(nsm: Nsm, args: tuple[str, ...]) -> None:
    alone, among = CliRunner().invoke(app_for(args), args), nsm(*args)
    assert (alone.exit_code, alone.stdout, alone.stderr) == (among.exit_code, among.stdout, among.stderr)


def test_serve_imports_no_other_command() -> None:
    program = f"import atexit, sys; atexit.register(lambda: print('service.cli.chat' in sys.modules)); {NSM[-1]}"
    result = subprocess.run([*NSM[:-1], program, "serve", "--help"], capture_output=True, text=True, check=False)
    assert result.stdout.endswith("\nFalse\n"), result.stdout


@pytest.mark.parametrize("args", [(), ("serve",), ("chat",), ("sessions", "verify")])
def test_flags_are_shown_without_a_type(nsm: Nsm, args: tuple[str, ...]) -> None:
    assert "bool" not in nsm(*args, "--help").stdout


def test_version(nsm: Nsm) -> None:
    assert nsm("--version").stdout == f"nsm {importlib.metadata.version('nsm-serve')}\n"


def test_a_group_without_a_command_shows_its_help(nsm: Nsm) -> None:
    result = nsm("sessions")
    assert result.exit_code == 2
    assert " delete " in result.stdout
    assert result.stderr == ""


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("bogus",), "No such command 'bogus'."),
        (("--bogus", "info"), "No such option: --bogus"),
        (("generate",), "Missing argument 'prompt'."),
        (("generate", "x", "--max-tokens", "many"), "Invalid value for '--max-tokens': must be an integer, got 'many'"),
        (("generate", "x", "--seed", "x"), "Invalid value for '--seed': must be an integer, got 'x'"),
        (("top", "--interval", "nan"), "Invalid value for '--interval': must be a finite number, got 'nan'"),
        (("bench", "gate", "--tolerance", "inf"), "Invalid value for '--tolerance': must be at most 1, got 'inf'"),
        (("sessions", "verify", "--tolerance", "inf"), "Invalid value for '--tolerance': must be at most 100, got"),
        (
            ("triton", "probe", "liveness", "--timeout-s", "inf"),
            "Invalid value for '--timeout-s': must be at most 3600",
        ),
        (
            ("export", "x", "--output", "y", "--format", "z"),
            "Invalid value for '--format': 'z' is not one of 'onnx', 'torch'\n",
        ),
        (("tune", "x", "--name", "y", "--epochs", "0"), "Invalid value for '--epochs': must be at least 1, got '0'"),
        (("tune", "x", "--name", "y", "--batch-tokens", "0"), "Invalid value for '--batch-tokens': must be at least 1"),
        (("generate", "x", "--seed", "2", "--json=1"), "Option '--json' does not take a value."),
        (("chat", "--sesion", "x"), "No such option: --sesion "),
        (("sessions", "show"), "Missing argument 'session_id'."),
        (("sessions", "list", "--limit", "0"), "Invalid value for '--limit': "),
    ],
)
def test_wrong_usage_is_one_line_that_names_the_option(nsm: Nsm, args: tuple[str, ...], message: str) -> None:
    result = nsm(*args)
    assert result.stderr.startswith(f"nsm: {message}")  # the rest is typer's own wording
    assert result.stderr.count("\n") == 1
    assert result.exit_code == 2


@pytest.mark.parametrize(
    "args",
    [("serve",), ("generate", "x"), ("chat",), ("sessions", "list"), ("train",), ("eval",), ("info",)],
    ids=lambda args: args[0],
)
def test_misspelt_variables_are_refused_by_every_command(nsm: Nsm, args: tuple[str, ...]) -> None:
    assert_one_line(nsm(*args, NSM_DATA_DIRR="/x"), "unknown setting NSM_DATA_DIRR; did you mean NSM_DATA_DIR?")


def test_a_bad_variable_is_named(nsm: Nsm) -> None:
    result = nsm("info", NSM_MAX_SLOTS="0")
    assert_one_line(result, "NSM_MAX_SLOTS (--max-slots): must be at least 1, got '0'")


@pytest.mark.parametrize("args", [("generate", "x"), ("chat",), ("info",)], ids=["generate", "chat", "info"])
def test_missing_model_is_an_error_of_one_line(nsm: Nsm, args: tuple[str, ...]) -> None:
    assert_one_line(nsm(*args, "--model", "/no/such"), f"{no_model('/no/such')} (set by NSM_MODEL or --model)")


def test_an_unexpected_error_is_one_line_too_and_debug_shows_it(nsm: Nsm, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**flags: object) -> None:
        raise KeyError("what nobody\nexpected")

    monkeypatch.setattr("service.settings.load_settings", fail)
    message = "internal error: KeyError: 'what nobody\\nexpected' (nsm --debug shows where)"
    assert_one_line(nsm("info"), message)
    with pytest.raises(KeyError):
        nsm("--debug", "info")


def test_unwritable_file_is_named(nsm: Nsm, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**flags: object) -> None:
        raise PermissionError(13, "Permission denied", "/root/report.json")

    monkeypatch.setattr("service.settings.load_settings", fail)
    assert_one_line(nsm("info"), "/root/report.json: Permission denied")


def test_info(nsm: Nsm, data_dir: object) -> None:
    facts = json.loads(nsm("info", "--json").stdout)
    assert facts["model"] == "tiny"
    assert facts["vocabulary"] == 512
    sizes = {"float32": 4, "int64": 8}
    total = 0
    for tensor in facts["state_layout"]:
        count = sizes[tensor["dtype"]]
        for length in tensor["shape"]:
            count *= length
        total += count
    assert facts["state_bytes"] == total
    assert facts["store"] == f"{data_dir}/sessions.db"
    lines = nsm("info").stdout.splitlines()
    assert f"parameters     {facts['parameters']:,}" in lines
    assert f"fingerprint    {facts['fingerprint']}" in lines


def test_info_of_a_model_without_slots_has_no_line_for_them(
    nsm: Nsm, tmp_path: Path, tiny_tokenizer: Tokenizer
) -> None:
    model = save_rwkv7(tmp_path / "rwkv7", tiny_tokenizer)
    lines = nsm("info", "--model", model).stdout.splitlines()
    assert "architecture   rwkv7" in lines
    assert not [line for line in lines if line.startswith("num states")]
    assert json.loads(nsm("info", "--model", model, "--json").stdout)["num_states"] is None


def test_the_console_script_takes_its_arguments_from_the_command_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["nsm", "bogus"])
    with pytest.raises(SystemExit) as exit_info:
        main()
    assert exit_info.value.code == 2
    assert capsys.readouterr().err == "nsm: No such command 'bogus'.\n"


def test_ctrl_c_while_modules_are_imported_ends_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("service.cli.main.app_for", interrupted)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 130
