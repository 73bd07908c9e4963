"""A whole load test: `python -m loadtests --profile short --slo short`. The exit code is 1 when an objective is missed.

Starts servers (or takes those of --url), writes scripts, runs Locust in processes of its own, judges and reports.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from loadtests.capacity import measure_capacity
from loadtests.conclusion import SAMPLES, conclude
from loadtests.resources import ResourceWatch
from loadtests.run_profile import Profile, load_profile
from loadtests.scripts import Author, Kind, Scripts
from loadtests.servers import Server, serving
from loadtests.slo import load_slo

ROOT = Path(__file__).resolve().parent.parent
LOCUSTFILE = ROOT / "loadtests" / "locustfile.py"
EXIT_BROKEN = 2


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(arguments)
    changes = {} if args.seconds is None else {"seconds": args.seconds}
    profile = load_profile(args.profile, **changes)
    slo = load_slo(args.slo or profile.name)
    args.out.mkdir(parents=True, exist_ok=True)
    started_at = time.monotonic()
    with contextlib.ExitStack() as stack:
        servers = stack.enter_context(servers_of(args, profile))
        urls = args.url or [server.url for server in servers]
        print(f"{profile.name}: {len(urls)} replicas; writing scripts", flush=True)
        scripts = Author(urls[0], profile, needs=needs_of(profile)).write()
        scripts.write(args.out / "scripts.json")
        (args.out / "profile.json").write_text(profile.model_dump_json(indent=1), "utf-8")
        if args.only_scripts:
            return 0
        capacity = capacity_of(urls, profile, scripts)
        pids = args.pid or [server.process.pid for server in servers]
        with ResourceWatch([(f"server {n}", pid) for n, pid in enumerate(pids)]) as watch:
            code = run_locust(args, profile, urls, capacity)
    if code:
        print(f"locust ended with {code}; {args.out}/locust.log tells more", file=sys.stderr)
        return EXIT_BROKEN
    facts = {
        "profile": profile.name,
        "replicas": len(urls),
        "processes": args.workers,
        "capacity, requests/s": f"{capacity:.3g}" if capacity else "not measured",
        "seconds in all": f"{time.monotonic() - started_at:.0f}",
    }
    return conclude(args.out, slo, watch.use, facts)


@contextlib.contextmanager
def servers_of(args: argparse.Namespace, profile: Profile) -> Iterator[list[Server]]:
    """None where the run was told whom to ask. They have a store of their own, which goes with them."""
    if args.url:
        yield []
        return
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        yield stack.enter_context(serving(profile.service, directory, store=args.store, model=args.model))


def needs_of(profile: Profile) -> list[Kind]:
    """The kinds of scripts that anybody in the profile plays."""
    users, loop = profile.users, profile.open_loop
    wanted: dict[Kind, bool] = {
        "completion": bool(
            users.completion or users.trouble or (loop and loop.trace == "azure") or _by_capacity(profile)
        ),
        "slow": bool(users.slow_reader),
        "chat": bool(users.chat),
        "session": bool(users.session or users.fork_storm or users.trouble or (loop and loop.trace == "mooncake")),
        "long": bool(users.long_context),
    }
    return [kind for kind, is_wanted in wanted.items() if is_wanted]


def capacity_of(urls: Sequence[str], profile: Profile, scripts: Scripts) -> float:
    """0 where nothing is offered in multiples of it."""
    if profile.open_loop is None or not _by_capacity(profile):
        return 0.0
    return measure_capacity(urls, profile, profile.open_loop, scripts)


def _by_capacity(profile: Profile) -> bool:
    return profile.open_loop is not None and profile.open_loop.unit == "capacity"


def run_locust(args: argparse.Namespace, profile: Profile, urls: Sequence[str], capacity: float) -> int:
    """Locust in one process, or a master and its workers; returns the exit code."""
    command = [sys.executable, "-m", "locust", "-f", str(LOCUSTFILE)]
    shared = [
        "--load-profile",
        str(args.out / "profile.json"),
        "--urls",
        ",".join(urls),
        "--scripts",
        str(args.out / "scripts.json"),
    ]
    shared += ["--processes-in-all", str(args.workers), "--capacity", str(capacity)]
    num_users = profile.users.total + (args.workers if profile.open_loop else 0)
    run = ["--headless", "--users", str(num_users), "--spawn-rate", "100"]
    run += ["--run-time", f"{profile.run_s:.0f}s", "--stop-timeout", "2"]
    run += ["--samples", str(args.out / SAMPLES), "--only-summary", "--html", str(args.out / "locust.html")]
    with contextlib.ExitStack() as stack:
        log = stack.enter_context((args.out / "locust.log").open("wb"))
        if args.workers > 1:
            port = ["--master-port", str(args.master_port)]
            for _ in range(args.workers):
                worker = subprocess.Popen([*command, *shared, "--worker", *port], cwd=ROOT, stdout=log, stderr=log)
                stack.callback(_end, worker)
            run += ["--master", "--master-bind-host", "127.0.0.1", "--master-bind-port", str(args.master_port)]
            run += ["--expect-workers", str(args.workers)]
        return subprocess.run([*command, *shared, *run], cwd=ROOT, stdout=log, stderr=log, check=False).returncode


def _end(process: subprocess.Popen[bytes]) -> None:
    """Workers end with their master; one that does not is ended."""
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m loadtests", description=__doc__)
    parser.add_argument("--profile", default="short", help="a file, or a name in loadtests/profiles")
    parser.add_argument("--slo", help="a file, or a name in loadtests/objectives; by default the profile's name")
    parser.add_argument("--seconds", type=float, help="of the closed loops, instead of the profile's")
    parser.add_argument("--out", type=Path, default=Path("build/loadtest"), help="directory of the report")
    parser.add_argument("--url", action="append", help="a replica that runs already; several times for several")
    parser.add_argument(
        "--pid", action="append", type=int, help="its process, to watch what it uses; as often as --url"
    )
    parser.add_argument("--workers", type=int, default=1, help="processes of Locust that make the load")
    parser.add_argument("--master-port", type=int, default=5557, help="where Locust's master hears its workers")
    parser.add_argument("--store", help="of the servers that are started: a Redis URL, or SQLite by default")
    parser.add_argument("--model", type=Path, help="of the servers that are started: a model directory")
    parser.add_argument("--only-scripts", action="store_true", help="write scripts.json and stop")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
