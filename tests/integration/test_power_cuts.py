"""Power cuts under a SQLite store: on an honest disk nothing acknowledged is lost; on one that lies no text is wrong.

One process is recorded; the files are then made as they may be after any of its writes.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from nsm_core.errors import NsmError, SnapshotCorrupt, StoreDamaged
from nsm_core.state.snapshot import Snapshot
from service.stores.sessions.key import SessionKey
from service.stores.sessions.sqlite import SqliteSessionStore
from tests.support.counts import scaled
from tests.support.fakes import FakeBackend, state_after
from tests.support.gateway import Gateway, error_of, gateway
from tests.support.power_cuts import Disk, Operation, build_recorder, read_recording, recorder_environment

ROOT = Path(__file__).resolve().parents[2]
NUM_CALLS = scaled(60, 400)
NUM_CUTS = scaled(30, 2_000)
ACKNOWLEDGED = "acknowledged"
OF_THE_PROCESS = ("-shm", "-open-", "-ballast")  # not of the data: they are made again
Log = tuple[int, ...]
Known = dict[str, tuple[int, Log]]  # version and log by session

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="preloads a library into a process")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Operation], list[Known]]:
    """All writes, and all that was acknowledged after each answer; at first nothing."""
    directory = tmp_path_factory.mktemp("power")
    data, recording = directory / "data", directory / "recording"
    data.mkdir()
    command = [sys.executable, "-m", "tests.support.power_cut_process", str(data), str(NUM_CALLS), "1"]
    environment = recorder_environment(build_recorder(directory), data, recording)
    subprocess.run(command, cwd=ROOT, env=environment, check=True)
    lines = (data / ACKNOWLEDGED).read_text().splitlines()
    history = [{name: (version, tuple(log)) for name, (version, log) in json.loads(line).items()} for line in lines]
    operations = read_recording(recording, data)
    recording.unlink()
    return operations, [{}, *history]


def cuts(operations: list[Operation], image: Path, *, is_honest: bool, seed: int = 3) -> Iterator[int]:
    """Makes `image` as it may be after each of several power cuts, and yields how many answers had been given."""
    rng, disk, num_answers = random.Random(seed), Disk(is_honest=is_honest), 0
    at = set(rng.sample(range(len(operations)), NUM_CUTS))
    for number, operation in enumerate(operations):
        num_answers += operation.name == ACKNOWLEDGED
        disk.apply(operation)
        if number in at:
            shutil.rmtree(image, ignore_errors=True)
            image.mkdir()
            for name, content in disk.lose_power(rng).items():
                if name != ACKNOWLEDGED and not any(part in name for part in OF_THE_PROCESS):
                    (image / name).write_bytes(content)
            yield num_answers


async def found_in(server: Gateway) -> Known:
    """What the store has, whose states must be those of its logs."""
    listed = (await server.client.get("/v1/sessions")).json()["data"]
    return {session["id"]: await stored(server, session["id"]) for session in listed}


async def stored(server: Gateway, name: str) -> tuple[int, Log]:
    key = SessionKey("default", name)
    session = await server.store.load(key)
    log = await server.store.read_log(key)
    if session.snapshot is not None:
        snapshot = Snapshot.decode(session.snapshot)
        assert snapshot.state == state_after(log[: session.head.position])
    return session.head.version, log


async def test_power_cut_on_an_honest_disk_loses_nothing_that_was_acknowledged(
    recorded: tuple[list[Operation], list[Known]], tmp_path: Path
) -> None:
    operations, history = recorded
    for num_answers in cuts(operations, tmp_path / "image", is_honest=True):
        async with gateway(FakeBackend(), store=SqliteSessionStore(tmp_path / "image" / "sessions.db")) as server:
            assert server.metric("nsm_store_damage_total", part="lost_writes") == 0
            found = await found_in(server)
            assert found in history[num_answers : num_answers + 2]  # or the call that the cut found under way
            for name in found:
                assert (await say(server, name)).status_code == 200


async def test_power_cut_on_a_disk_that_lies_is_refused_by_name_or_leaves_an_earlier_conversation(
    recorded: tuple[list[Operation], list[Known]], tmp_path: Path
) -> None:
    operations, history = recorded
    for num_answers in cuts(operations, tmp_path / "image", is_honest=False):
        async with after_a_lie(tmp_path) as server:
            for name in {name for known in history for name in known} if server else ():
                await check_damaged(server, name, history[: num_answers + 2])


async def test_a_client_that_sends_the_version_it_saw_never_goes_on_from_an_earlier_conversation(
    recorded: tuple[list[Operation], list[Known]], tmp_path: Path
) -> None:
    """Even where a disk lied, and lost its lie: the store cannot know, but the client does."""
    operations, history = recorded
    num_refused = 0
    # few cuts leave a session at an earlier version, and of some seeds none
    many = itertools.chain.from_iterable(
        cuts(operations, tmp_path / "image", is_honest=False, seed=seed) for seed in range(3, 9)
    )
    for num_cuts, num_answers in enumerate(many):
        if num_refused and num_cuts >= NUM_CUTS:
            break
        async with after_a_lie(tmp_path) as server:
            for name, (version, _) in history[num_answers].items() if server else ():
                answer = await say(server, name, expected_version=version)
                num_refused += answer.status_code == 409
                if answer.status_code == 200:
                    assert await went_on_from(server, name) in (
                        None,
                        *was_at(history[: num_answers + 1], name, version),
                    )
                else:
                    assert error_of(answer)["code"] not in (None, "internal_error"), answer.text
    assert num_refused


@contextlib.asynccontextmanager
async def after_a_lie(directory: Path) -> AsyncIterator[Gateway | None]:
    """None: the start was refused by name."""
    store = SqliteSessionStore(directory / "image" / "sessions.db")
    async with contextlib.AsyncExitStack() as stack:
        try:
            server = await stack.enter_async_context(gateway(FakeBackend(), store=store))
        except NsmError:
            server = None
        yield server


async def check_damaged(server: Gateway, name: str, history: list[Known]) -> None:
    """A turn of a session that may be damaged is refused by name, or goes on from what the session once was."""
    answer = await say(server, name)
    if answer.status_code != 200:
        assert error_of(answer)["code"] not in (None, "internal_error"), answer.text
        return
    version = answer.json()["session"]["version"]
    assert await went_on_from(server, name) in (None, *was_at(history, name, version - 1))


async def went_on_from(server: Gateway, name: str) -> Log | None:
    """The log before the newest turn; None where a part that the turn did not read is refused by name."""
    try:
        _, log = await stored(server, name)
    except (StoreDamaged, SnapshotCorrupt):
        return None
    return log[: -1 - len(sampled_ids())]


def was_at(history: list[Known], name: str, version: int) -> set[Log]:
    """The logs that a session had at a version: one, unless it was deleted and made again under the same id."""
    return {known[name][1] for known in history if name in known and known[name][0] == version}


def sampled_ids() -> Log:
    return FakeBackend().script_ids[:3]


async def say(server: Gateway, name: str, **fields: int) -> httpx.Response:
    body: dict[str, Any] = {"input": [5], "max_tokens": len(sampled_ids()), **fields}
    return await server.client.post(f"/v1/sessions/{name}/generate", json=body)
