"""A whole load test: `python -m loadtests --profile short --slo short`.

Starts servers (or takes those of --url), writes scripts, runs Locust in processes of its own, judges and reports. The
exit code is 0 when every objective is met, 1 when one is missed, 2 when there is no result: a wrong option, a server
that cannot be reached or refuses, a run that was interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from loadtests.capacity import measure_capacity
from loadtests.conclusion import conclude, prepare_directory
from loadtests.errors import EXIT_NO_RESULT, RunError
from loadtests.interruption import Interrupted, interruptible
from loadtests.locust_process import run_locust
from loadtests.option_types import count, positive
from loadtests.option_types import url as server_url
from loadtests.plain_http import check_ready, is_alive
from loadtests.resources import ResourceWatch
from loadtests.run_profile import Profile, load_profile
from loadtests.scripts import Author, Kind, Scripts
from loadtests.servers import Server, serving
from loadtests.slo import Slo, Verdict, at_least, load_slo


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(arguments)
    try:
        with interruptible():
            return run(args)
    except RunError as error:
        print(f"no result: {error}", file=sys.stderr)
    except Interrupted as interruption:
        print(f"no result: {interruption} before the load began", file=sys.stderr)
    return EXIT_NO_RESULT


def run(args: argparse.Namespace) -> int:
    """The exit code. Raises RunError and Interrupted where there is nothing to judge."""
    changes = {} if args.seconds is None else {"seconds": args.seconds}
    profile = load_profile(args.profile, **changes)
    slo = Slo() if args.only_scripts else load_slo(args.slo or profile.name)
    prepare_directory(args.out)
    with servers_of(args, profile) as servers:
        urls = args.url or [server.url for server in servers]
        scripts = write_scripts(args.out, profile, urls)
        if args.only_scripts:
            return 0
        pids = args.pid or [server.process.pid for server in servers]
        return load_and_judge(args, profile, slo, urls, pids, capacity_of(urls, profile, scripts))


def write_scripts(out: Path, profile: Profile, urls: Sequence[str]) -> Scripts:
    for url in urls:
        check_ready(url)
    print(f"{profile.name}: {len(urls)} replicas; writing scripts", flush=True)
    scripts = Author(urls[0], profile, needs=needs_of(profile)).write()
    scripts.write(out / "scripts.json")
    (out / "profile.json").write_text(profile.model_dump_json(indent=1), "utf-8")
    return scripts


def load_and_judge(
    args: argparse.Namespace, profile: Profile, slo: Slo, urls: Sequence[str], pids: Sequence[int], capacity: float
) -> int:
    started_at = time.monotonic()
    interruption = ""
    with ResourceWatch([(f"server {n}", pid) for n, pid in enumerate(pids)]) as watch:
        try:
            run_locust(args, profile, urls, capacity)
        except Interrupted as error:
            interruption = str(error)
    facts = {
        "profile": profile.name,
        "replicas": len(urls),
        "processes": args.workers,
        "capacity, requests/s": f"{capacity:.3g}" if capacity else "not measured",
        "seconds of load": f"{time.monotonic() - started_at:.0f}",
    }
    more = [] if interruption else still_there(urls)
    return conclude(args.out, slo, watch.use, facts, more=more, interruption=interruption)


def still_there(urls: Sequence[str]) -> list[Verdict]:
    """A server that does not answer after the load did not bear it."""
    return [at_least(url, "answers after the load", 1, float(is_alive(url))) for url in urls]


@contextlib.contextmanager
def servers_of(args: argparse.Namespace, profile: Profile) -> Iterator[list[Server]]:
    """None where --url names some. Those that are started have a store of their own, which goes with them."""
    if args.url:
        yield []
        return
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        yield stack.enter_context(serving(profile.service, directory, store=args.store, model=args.model))


def needs_of(profile: Profile) -> list[Kind]:
    """The kinds of scripts that the profile's users and its open loop play."""
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


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m loadtests", description=__doc__)
    parser.add_argument("--profile", default="short", help="a file, or a name in loadtests/profiles")
    parser.add_argument("--slo", help="a file, or a name in loadtests/objectives; by default the profile's name")
    parser.add_argument("--seconds", type=positive, help="of the closed loops, instead of the profile's")
    parser.add_argument("--out", type=Path, default=Path("build/loadtest"), help="directory of the report")
    parser.add_argument(
        "--url", action="append", type=server_url, help="a replica that runs already; several times for several"
    )
    parser.add_argument(
        "--pid", action="append", type=count, help="its process, to watch its memory and descriptors; as often as --url"
    )
    parser.add_argument("--workers", type=count, default=1, help="processes of Locust that make the load")
    parser.add_argument("--master-port", type=count, default=5557, help="where Locust's master hears its workers")
    parser.add_argument("--store", help="of the servers that are started: a Redis URL, or SQLite by default")
    parser.add_argument("--model", type=Path, help="of the servers that are started: a model directory")
    parser.add_argument("--only-scripts", action="store_true", help="write scripts.json and stop")
    args = parser.parse_args(arguments)
    if args.pid and len(args.pid) != len(args.url or ()):
        parser.error("--pid is given as often as --url, for the processes of these servers")
    if args.url and (args.store or args.model):
        parser.error("--store and --model are for servers that the run starts, not for those of --url")
    return args


if __name__ == "__main__":
    sys.exit(main())
