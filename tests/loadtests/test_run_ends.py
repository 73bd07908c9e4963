"""Exit codes and words of load tests whose target is down, refuses or dies, and of runs that are cut."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadtests import __main__ as loadtests
from loadtests import conclusion
from loadtests import triton as triton_loadtests
from loadtests.arrivals import share_of
from loadtests.conclusion import SAMPLES, conclude
from loadtests.errors import EXIT_MISSED, EXIT_NO_RESULT, RunError
from loadtests.run_end import RunEnd
from loadtests.run_profile import Profile, Service, load_profile
from loadtests.servers import Server, serving
from loadtests.slo import Slo
from loadtests.steps import arrivals_of
from tests.loadtests.hand_servers import answering
from tests.loadtests.test_samples import make_sample
from tests.support.counts import scaled
from tests.support.redis_servers import free_port

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 100
COMPLETIONS = """
seconds = {seconds}
drain_s = 5
timeout_s = 5
[users]
completion = 2
[texts]
scripts = 1
max_tokens = 4
prompt_tokens = [8]
[behaviour]
think_s = 0.02
"""
pytestmark = pytest.mark.timeout(LIMIT_S + 60)


def write_files(directory: Path, *, seconds: float, slo: str = "[[objective]]\n") -> list[str]:
    (directory / "mine.toml").write_text(COMPLETIONS.format(seconds=seconds))
    (directory / "slo.toml").write_text(slo)
    return [f"--profile={directory / 'mine.toml'}", f"--slo={directory / 'slo.toml'}", f"--out={directory / 'out'}"]


def dead_url() -> str:
    return f"http://127.0.0.1:{free_port()}"


@pytest.fixture
def server(tmp_path: Path, tiny_model_dir: Path) -> Iterator[Server]:
    with serving(Service(replicas=1), tmp_path, model=tiny_model_dir) as (server,):
        yield server


def test_X13_a_dead_url_is_one_line_and_exit_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = dead_url()
    assert loadtests.main([f"--url={url}", f"--out={tmp_path}"]) == EXIT_NO_RESULT
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"no result: {url} cannot be reached: [Errno 111] Connection refused"


def test_X13_one_dead_replica_of_two_is_found_before_the_load(
    tmp_path: Path, server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    url = dead_url()
    assert loadtests.main([f"--url={server.url}", f"--url={url}", f"--out={tmp_path / 'out'}"]) == EXIT_NO_RESULT
    assert url in capsys.readouterr().err


@pytest.mark.parametrize(
    ("status", "body", "announced", "words"),
    [
        (401, b'{"error": {"code": "invalid_api_key"}}', None, "refused GET /health/ready: 401"),
        (503, b'{"status": "draining"}', None, "refused GET /health/ready: 503"),
        (502, b"<html>bad gateway", None, "502 <html>bad gateway"),
        (200, b"<html>hello", None, "something other than JSON"),
        (200, b"[1, 2]", None, "with list, not with a JSON object"),
        (200, b'{"status": "ok"}', None, "another kind of service"),
        (200, b'{"sta', 100, "broke off"),
    ],
)
def test_X13_a_target_that_refuses_is_one_line_and_exit_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], status: int, body: bytes, announced: int | None, words: str
) -> None:
    with answering(status, body, announced=announced) as url:
        assert loadtests.main([f"--url={url}", f"--out={tmp_path}"]) == EXIT_NO_RESULT
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"no result: {url} ")
    assert words in line


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--profile={mine}"], "--slo mine: No such file or directory; the names are conversations, curve"),
        (["--profile=nowhere"], "--profile nowhere: No such file or directory; the names are conversations, curve"),
        (["--profile={wrong}"], "users.chatt: Extra inputs are not permitted"),
        (["--profile={broken}"], "broken.toml"),
        (["--out={mine}"], "--out"),
        (["--model=/nowhere"], "the server ended with"),
        (["--url={url}", "--pid=4194304"], "cannot be reached"),
    ],
)
def test_X13_options_that_cannot_be_are_exit_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], words: str
) -> None:
    write_files(tmp_path, seconds=1)
    (tmp_path / "wrong.toml").write_text("seconds = 1\n[users]\nchatt = 1\n")
    (tmp_path / "broken.toml").write_text("seconds = = 1\n")
    names = {name: str(tmp_path / f"{name}.toml") for name in ("mine", "wrong", "broken")}
    arguments = [option.format(**names, url=dead_url()) for option in options]
    arguments += [] if any("--out" in option for option in options) else [f"--out={tmp_path / 'out'}"]
    assert loadtests.main(arguments) == EXIT_NO_RESULT
    error = capsys.readouterr().err
    assert error.startswith("no result: ")
    assert words in error
    assert "Traceback" not in error.splitlines()[0]


@pytest.mark.parametrize(
    "option",
    ["--url=https://x:1", "--url=x:1", "--url=http://x:1/v1", "--seconds=0", "--seconds=nan", "--workers=0"],
)
def test_X13_values_of_options_are_checked_before_anything_starts(option: str) -> None:
    with pytest.raises(SystemExit) as ended:
        loadtests.main([option])
    assert ended.value.code == EXIT_NO_RESULT


@pytest.mark.parametrize("option", ["--rates=0", "--rates=x", "--rates=1,-1", "--step-s=0", "--cancel-share=2"])
def test_X13_the_same_of_triton(option: str) -> None:
    with pytest.raises(SystemExit) as ended:
        triton_loadtests.main([option])
    assert ended.value.code == EXIT_NO_RESULT


def test_X13_a_dead_triton_is_one_line_and_exit_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    address = f"127.0.0.1:{free_port()}"
    assert triton_loadtests.main([f"--url={address}", f"--out={tmp_path}"]) == EXIT_NO_RESULT
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"no result: {address} cannot be reached: ")


def start_run(options: list[str], **kwargs: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "loadtests", *options]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=ROOT, stdout=pipe, stderr=pipe, text=True, **kwargs)


def wait_for_samples(out: Path, run: subprocess.Popen[str]) -> None:
    """Until the load has begun: Locust makes the file when it starts."""
    deadline = time.monotonic() + LIMIT_S
    while not (out / SAMPLES).exists():
        assert run.poll() is None, run.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_X13_a_server_that_dies_under_load_is_a_missed_objective(tmp_path: Path, server: Server) -> None:
    """Though the file asks for nothing that a dead server would miss."""
    options = write_files(tmp_path, seconds=6)
    with start_run([*options, f"--url={server.url}"]) as run:
        wait_for_samples(tmp_path / "out", run)
        server.process.kill()
        output, error = run.communicate(timeout=LIMIT_S)
    assert run.returncode == EXIT_MISSED, error
    assert f"MISSED {server.url}: answers after the load: 0 (limit 1)" in output
    assert "0 wrong" in output or "met    *: wrong answers: 0" in output
    assert "objectives missed" in (tmp_path / "out" / "report.html").read_text("utf-8")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_X13_a_run_that_is_interrupted_has_no_result(tmp_path: Path, server: Server, number: signal.Signals) -> None:
    options = write_files(tmp_path, seconds=300)
    with start_run([*options, f"--url={server.url}"]) as run:
        wait_for_samples(tmp_path / "out", run)
        children = psutil.Process(run.pid).children(recursive=True)
        run.send_signal(number)
        _, error = run.communicate(timeout=LIMIT_S)
    assert run.returncode == EXIT_NO_RESULT
    assert error == f"no result: the run was ended by {number.name}\n"
    assert "every objective met" not in (tmp_path / "out" / "report.html").read_text("utf-8")
    assert not any(child.is_running() for child in children)  # no load goes on behind the operator's back


def test_X13_a_process_of_locust_that_is_killed_leaves_no_result(tmp_path: Path, server: Server) -> None:
    """One of two that make the load: what it sent and did not report is missing from every figure."""
    options = [*write_files(tmp_path, seconds=8), "--workers=2", f"--master-port={free_port()}"]
    with start_run([*options, f"--url={server.url}"]) as run:
        wait_for_samples(tmp_path / "out", run)
        workers = [child for child in psutil.Process(run.pid).children() if "--worker" in child.cmdline()]
        workers[0].kill()
        _, error = run.communicate(timeout=LIMIT_S)
    assert run.returncode == EXIT_NO_RESULT
    assert error.startswith("no result: a process of Locust ended with -9; see ")


def write_run(directory: Path, samples: list[Any], end: RunEnd | None) -> None:
    (directory / SAMPLES).write_text("".join(f"{sample.to_json()}\n" for sample in samples))
    if end is not None:
        end.write(directory)


def test_X13_a_curve_that_stopped_after_two_of_seven_steps_has_no_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile = load_profile("curve")
    assert profile.open_loop is not None
    planned = {f"{n + 1}: {rate:g}x": 3 for n, rate in enumerate(profile.open_loop.rates)}
    samples = [make_sample(scenario="arrival", step=step) for step in list(planned)[:2] for _ in range(3)]
    write_run(tmp_path, samples, RunEnd(profile.run_s, 36.0, planned))
    slo = Slo.model_validate({"objective": [{"scenario": "arrival", "step": "[1-4]: *"}]})
    assert conclude(tmp_path, slo) == EXIT_NO_RESULT
    error = capsys.readouterr().err.splitlines()
    assert error[0] == "no result: the load stopped after 36 of 126 s"
    assert error[1:] == [f"no result: step {step}: 0 of 3 arrivals were recorded" for step in list(planned)[2:]]
    assert "every objective met" not in (tmp_path / "report.html").read_text("utf-8")


def test_X13_samples_of_a_run_that_never_ended_have_no_result(tmp_path: Path) -> None:
    write_run(tmp_path, [make_sample()], None)
    assert conclude(tmp_path, Slo()) == EXIT_NO_RESULT


@pytest.mark.parametrize("text", [None, "{", '{"scenario": 1, "x": 2}'])
def test_X13_samples_that_cannot_be_read_are_exit_2(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / SAMPLES).write_text(text)
    assert conclusion.main([str(tmp_path), "--slo=short"]) == EXIT_NO_RESULT


def test_X13_locust_by_hand_says_what_is_wrong_and_ends(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "locust", "-f", "loadtests/locustfile.py", "--headless"]
    command += ["--load-profile=short", f"--scripts={tmp_path / 'scripts.json'}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == EXIT_NO_RESULT
    assert "cannot be read as scripts, which --only-scripts writes" in done.stderr
    assert "Traceback" not in done.stderr


def test_X13_one_request_that_fails_does_not_cut_its_sibling() -> None:
    """Of two copies of one turn at the end of a run, one may give up while the other is answered."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.loadtests.siblings_process"],
        cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=True,
    )  # fmt: skip
    assert done.stdout.split() == ["answered", "Refused"]


ENDINGS = st.sampled_from(["ok", "wrong", "rejected", "failed", "unfinished", "cancelled"])
LIMITS = st.fixed_dictionaries(
    {},
    optional={
        "max_failed_share": st.sampled_from([0.0, 0.5, 1.0]),
        "max_rejected_share": st.sampled_from([0.0, 0.5]),
        "e2e_ms": st.just({"p99": 1000.0}),
        "min_requests": st.integers(1, 4),
    },
)


@settings(max_examples=scaled(10, 500), deadline=None)
@given(
    endings=st.lists(ENDINGS, max_size=5),
    limits=LIMITS,
    ran_s=st.sampled_from([10.0, 9.5, 4.0]),
    lost=st.integers(0, 2),
    is_there=st.booleans(),
)
def test_X13_an_exit_code_is_0_only_of_a_whole_run_that_met_everything(
    endings: list[Any], limits: dict[str, Any], ran_s: float, lost: int, is_there: bool
) -> None:
    samples = [make_sample(step="1: 1/s", outcome=outcome, retry_after_s=1.0) for outcome in endings]
    end = RunEnd(10.0, ran_s, {"1: 1/s": len(samples) + lost})
    slo = Slo.model_validate({"objective": [limits]})
    verdicts = loadtests.at_least("http://x", "answers after the load", 1, float(is_there))
    with tempfile.TemporaryDirectory() as directory:
        write_run(Path(directory), samples, end)
        code = conclude(Path(directory), slo, more=[verdicts])
        summary = json.loads((Path(directory) / "summary.json").read_text())
    is_met = all(text.startswith("met") for text in summary["verdicts"])
    is_whole = ran_s > 9 and not lost
    assert code == (EXIT_NO_RESULT if not is_whole else 0 if is_met else EXIT_MISSED)
    if code == 0:
        assert is_there
        assert "wrong" not in endings


NUMBERS = st.one_of(st.integers(-2, 50), st.floats(allow_nan=True, allow_infinity=True), st.just("x"))
LOOPS = st.fixed_dictionaries(
    {"rates": st.lists(st.floats(0.01, 30), min_size=1, max_size=4), "step_s": st.floats(0.5, 20)},
    optional={
        "trace": st.sampled_from(["azure", "mooncake"]),
        "pause_s": st.floats(0, 5),
        "length_scale": st.floats(1e-6, 10),
        "unit": st.sampled_from(["per_s", "capacity"]),
    },
)
PROFILES = st.fixed_dictionaries(
    {"seconds": st.one_of(st.floats(0.1, 10), NUMBERS)},
    optional={
        "open_loop": LOOPS,
        "users": st.fixed_dictionaries({}, optional={"chat": NUMBERS, "sesion": st.just(1)}),
        "texts": st.fixed_dictionaries({}, optional={"max_tokens": NUMBERS, "prompt_tokens": st.lists(NUMBERS)}),
        "drain_s": NUMBERS,
    },
)


def load_fields(fields: dict[str, Any]) -> Profile | str:
    """A profile, or why it was refused."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "mine.json"
        path.write_text(json.dumps(fields))
        try:
            return load_profile(path)
        except RunError as error:
            return str(error)


@settings(max_examples=scaled(60, 2000), deadline=None)
@given(fields=PROFILES, num_processes=st.integers(1, 3))
def test_X13_any_profile_is_refused_or_planned_within_its_time(fields: dict[str, Any], num_processes: int) -> None:
    profile = load_fields(fields)
    if isinstance(profile, str):
        assert len(profile.splitlines()) == 1
        return
    assert 0 < profile.run_s < float("inf")
    loop = profile.open_loop
    if loop is None:
        return
    arrivals = arrivals_of(profile, loop, 3.0)
    assert {arrival.step for arrival in arrivals} == {f"{n + 1}: {rate:g}{'x' if loop.unit == 'capacity' else '/s'}"
                                                      for n, rate in enumerate(loop.rates)}  # fmt: skip
    assert all(0 <= arrival.at_s <= profile.run_s for arrival in arrivals)
    shares = [share_of(arrivals, index, num_processes) for index in range(num_processes)]
    assert sum(len(share) for share in shares) == len(arrivals)


def test_X12_calls_to_a_target_do_not_go_through_a_proxy(tmp_path: Path, server: Server) -> None:
    """Of HTTP and of gRPC; the load itself never did."""
    with answering(502, b"proxied") as proxy:
        variables = ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy")
        environ = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
        environ |= {variant: proxy for name in variables for variant in (name, name.upper())}
        options = [*write_files(tmp_path, seconds=1), "--only-scripts", f"--url={server.url}"]
        with start_run(options, env=environ) as run:
            _, error = run.communicate(timeout=LIMIT_S)
        assert (run.returncode, error) == (0, "")
        command = [sys.executable, "-m", "loadtests.triton", f"--url=127.0.0.1:{free_port()}", f"--out={tmp_path}"]
        done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == EXIT_NO_RESULT
        assert "Connection refused" in done.stderr  # the server's own, not the proxy's answer
