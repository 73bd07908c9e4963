"""Whole load tests in small counts: servers, scripts, Locust in processes of its own, objectives, exit code."""

from __future__ import annotations

import collections
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from loadtests.run_profile import Service, load_profile
from loadtests.samples import Sample, read_samples
from loadtests.servers import Server, serving
from loadtests.slo import judge, load_slo
from loadtests.steps import arrivals_of
from tests.support.counts import scaled
from tests.support.redis_servers import free_port
from tests.support.triton_servers import RunningTriton

ROOT = Path(__file__).resolve().parents[2]
RUN_S = scaled(110, 1000)
SECONDS = scaled(5, 120)
pytestmark = pytest.mark.timeout(RUN_S + 60)

EVERYBODY = f"""
seconds = {SECONDS}
drain_s = 20
[users]
completion = 1
chat = 1
session = 1
long_context = 1
fork_storm = 1
slow_reader = 1
trouble = 4
[texts]
scripts = 1
turns = 3
max_tokens = 4
slow_tokens = 8
prompt_tokens = [8]
[behaviour]
think_s = 0.05
cancel_share = 0.2
retry_share = 0.2
long_chunk_tokens = 64
long_context_tokens = 192
forks = 3
slow_pause_s = 0.02
"""
NOBODY_IS_WRONG = "[[objective]]\nmax_failed_share = 0.0\n" + "".join(
    f'[[objective]]\nscenario = "{name}"\n'
    for name in (
        "completion",
        "chat",
        "session",
        "long_context",
        "fork",
        "fork_turn",
        "slow_reader",
        "leave",
        "leave_and_read_on",
        "cancel_turn_next",
        "send_twice_equal",
    )
)
ARRIVALS = """
seconds = 1
drain_s = 20
[texts]
scripts = 1
max_tokens = 4
prompt_tokens = [8, 32]
[open_loop]
trace = "{trace}"
rates = [2, 6]
step_s = 2
length_scale = 0.02
"""
CONVERSATIONS = [[1, 2, 3], [5, 6], [1, 2, 4, 9], [5, 7, 7], [1, 2, 4, 8], [5, 7, 8]]  # two of them, by their blocks
IMPOSSIBLE = "[[objective]]\ne2e_ms = { p50 = 0.001 }\n"


@pytest.fixture(scope="module")
def replicas(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> Iterator[list[Server]]:
    """Two on one store, for runs that leave them as they were."""
    with serving(Service(replicas=2), tmp_path_factory.mktemp("replicas"), model=tiny_model_dir) as servers:
        yield servers


def write(directory: Path, *, profile: str, slo: str) -> list[str]:
    """The options that name these files and a directory for the report."""
    (directory / "profile.toml").write_text(profile)
    (directory / "slo.toml").write_text(slo)
    names = {"profile": "profile.toml", "slo": "slo.toml", "out": "out"}
    return [f"--{option}={directory / name}" for option, name in names.items()]


def run(module: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Its output is shown when the test fails."""
    command = [sys.executable, "-m", module, *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=RUN_S, check=False)
    print(done.stdout, done.stderr)  # noqa: T201
    return done


def write_conversations(directory: Path) -> Path:
    """A trace whose requests continue each other."""
    path = directory / "conversations.jsonl"
    rows = [
        {"timestamp": 500 * number, "input_length": 100, "output_length": 20, "hash_ids": blocks}
        for number, blocks in enumerate(CONVERSATIONS)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def urls_of(servers: Sequence[Server]) -> list[str]:
    return [f"--url={server.url}" for server in servers]


def counts_of(samples: Sequence[Sample]) -> collections.Counter[str]:
    return collections.Counter(sample.outcome for sample in samples)


def test_B5_every_kind_of_user_gets_the_right_texts_over_replicas(tmp_path: Path, replicas: list[Server]) -> None:
    options = write(tmp_path, profile=EVERYBODY, slo=NOBODY_IS_WRONG)
    assert run("loadtests", *options, *urls_of(replicas)).returncode == 0
    samples = read_samples(tmp_path / "out" / "samples.jsonl")
    for sample in samples:
        assert sample.e2e_ms is not None
        assert sample.e2e_ms >= (sample.ttft_ms or 0.0) >= 0.0
    whole = [sample for sample in samples if sample.scenario in ("completion", "chat", "session") and sample.tokens]
    assert {sample.tokens for sample in whole if sample.outcome == "ok"} == {4}
    assert any(sample.resumed_tokens for sample in samples if sample.scenario == "session")
    assert (tmp_path / "out" / "report.html").stat().st_size > 10_000


def test_B4_two_processes_send_each_arrival_once_and_a_miss_is_an_exit_code(
    tmp_path: Path, replicas: list[Server]
) -> None:
    """Conversations of a trace, which are sessions: each is one process's from its first turn to its last."""
    profile = f'{ARRIVALS.format(trace="mooncake")}\ntrace_file = "{write_conversations(tmp_path)}"'
    options = write(tmp_path, profile=profile, slo=IMPOSSIBLE)
    distributed = ["--workers=2", f"--master-port={free_port()}"]
    assert run("loadtests", *options, *distributed, *urls_of(replicas)).returncode == 1
    loaded = load_profile(tmp_path / "profile.toml")
    assert loaded.open_loop is not None
    planned = collections.Counter(arrival.step for arrival in arrivals_of(loaded, loaded.open_loop, 0.0))
    samples = read_samples(tmp_path / "out" / "samples.jsonl")
    assert counts_of(samples) == {"ok": sum(planned.values())}
    assert collections.Counter(sample.step for sample in samples) == planned
    assert any(sample.resumed_tokens for sample in samples)


def test_a_wrong_text_is_found_and_locust_itself_says_so(tmp_path: Path, replicas: list[Server]) -> None:
    """By hand, as with Locust's own pages: scripts first, then Locust with objectives."""
    options = write(tmp_path, profile=ARRIVALS.format(trace="azure"), slo="[[objective]]")
    assert run("loadtests", *options, "--only-scripts", *urls_of(replicas)).returncode == 0
    path = tmp_path / "out" / "scripts.json"
    scripts = json.loads(path.read_text())
    scripts[0]["answers"] = [f"{text}!"[1:] for text in scripts[0]["answers"]]  # of the short prompts
    path.write_text(json.dumps(scripts))
    locust = ["-f", "loadtests/locustfile.py", "--headless", "--users=1", "--only-summary"]
    ours = [f"--load-profile={tmp_path / 'profile.toml'}", f"--slo={tmp_path / 'slo.toml'}", f"--scripts={path}"]
    ours += [f"--urls={','.join(server.url for server in replicas)}", f"--samples={tmp_path / 'samples.jsonl'}"]
    done = run("locust", *locust, *ours)
    assert done.returncode == 1
    assert "MISSED *: wrong answers" in done.stderr
    counts = counts_of(read_samples(tmp_path / "samples.jsonl"))
    assert set(counts) == {"ok", "wrong"}
    assert sum(counts.values()) == 16


@pytest.mark.slow
def test_P6_overload_is_refused_at_once_and_leaves_nothing_behind(tmp_path: Path) -> None:
    """Ten times the capacity, with the bundled model: how long what is let in may wait follows from the queue alone."""
    profile = f"""
    seconds = 1
    drain_s = 40
    [service]
    replicas = 1
    max_slots = 2
    queue_limit = 3
    [texts]
    scripts = 1
    max_tokens = 128
    prompt_tokens = [8]
    [open_loop]
    unit = "capacity"
    rates = [0.2, 10, 0.2]
    step_s = {scaled(4, 60)}
    pause_s = 4
    length_scale = 1
    """
    slo = """
    [[objective]]
    step = "2: *"
    max_failed_share = 0.0
    min_rejected = 10
    rejection_ms = { p50 = 500 }
    e2e_ms = { p99 = 15000 }
    [[objective]]
    step = "[13]: *"
    max_failed_share = 0.0
    max_rejected_share = 0.0
    e2e_ms = { p99 = 15000 }
    [service]
    max_rss_rise_mb = 100
    max_connections_left = 0
    """
    options = write(tmp_path, profile=profile, slo=slo)
    assert run("loadtests", *options).returncode == 0
    rejected = [sample for sample in read_samples(tmp_path / "out" / "samples.jsonl") if sample.outcome == "rejected"]
    assert {sample.status for sample in rejected} == {503}
    assert all(sample.retry_after_s is not None and sample.retry_after_s >= 1 for sample in rejected)


@pytest.mark.slow
def test_many_short_turns_leave_memory_files_and_connections_flat(tmp_path: Path, replicas: list[Server]) -> None:
    """The profile of an hour's soak, in seconds."""
    options = [f"--out={tmp_path}", f"--seconds={scaled(8, 600)}", *urls_of(replicas)]
    options += [f"--pid={server.process.pid}" for server in replicas]
    assert run("loadtests", "--profile=soak", *options).returncode == 0
    assert len(read_samples(tmp_path / "samples.jsonl")) > scaled(50, 20_000)


@pytest.mark.triton
@pytest.mark.parametrize("trace", ["mooncake", "azure"][: scaled(1, 2)])
def test_B3_the_same_over_grpc(tmp_path: Path, triton: RunningTriton, trace: str) -> None:
    options = ["--rates=2,6", "--step-s=2", "--max-tokens=4", "--scripts=2", "--turns=2", "--prompt-tokens=8"]
    options += [f"--trace={trace}", "--cancel-share=0.25", f"--url={triton.grpc_url}", f"--out={tmp_path}"]
    options += [f"--trace-file={write_conversations(tmp_path)}"] if trace == "mooncake" else []
    assert run("loadtests.triton", *options, "--length-scale=0.02").returncode == 0
    samples = read_samples(tmp_path / "samples.jsonl")
    assert counts_of(samples) == {"ok": 12, "cancelled": 4}
    assert any(sample.resumed_tokens for sample in samples) == (trace == "mooncake")
    assert all(verdict.is_met for verdict in judge(load_slo("triton"), samples))
