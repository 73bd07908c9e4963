"""What older snapshots buy and cost: `python -m benchmarks.session_rewind --redis`. Tables, then one line of JSON.

A session of pulse-books over `--turns` turns of `--turn-tokens` tokens of books, once for each number of older
snapshots (NSM_RETAINED_SNAPSHOTS), all with the states of one reading. Its turns commit their tokens; a state is
stored, packed, when more than `--snapshot-tokens` came since the last one, as in a session that rests after each turn:

- bytes: what the session takes in SQLite (file size) and Redis (MEMORY USAGE of its keys), against the raw state;
- rewind: the time of going back so many tokens, the commit included. A rewind makes the session shorter, so each one
  starts from a fresh copy of the file. A fork at an earlier place reads the same tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import os
import platform
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import torch
from redis.asyncio import Redis

from benchmarks.measured_model import MEASURED_MODEL
from benchmarks.session_store import redis_store
from nsm_core.config import EngineConfig
from nsm_core.engine.request import Finished, GenerationRequest, PromptState, Resume
from nsm_core.model.loader import load_checkpoint
from nsm_core.sampling.params import SamplingParams
from nsm_core.state.quantize import StateFormat
from nsm_core.state.snapshot import SamplerState, Snapshot, SnapshotHeader
from nsm_lab.provenance import source_commit
from nsm_lab.training.data_files import read_documents
from service.backends.local import LocalBackend
from service.state.at_position import read_up_to
from service.stores.sessions.base import Commit, NewSession, Rewind, SessionStore
from service.stores.sessions.key import SessionKey
from service.stores.sessions.sqlite import SqliteSessionStore
from service.telemetry.metrics.metrics import Metrics
from service.turns.lease import HeldLease, Leases

KEY = SessionKey("default", "s")
SNAPSHOT_TOKENS = 320  # what pulse-books reads in 40 ms at 8,000 tokens/s
PART_TURNS = 100  # states in memory at once
DISTANCES = (80, 1_600, 6_400, 25_600)
WITHOUT = 1_600  # without older snapshots each takes the same


@dataclasses.dataclass(frozen=True, slots=True)
class StoreCase:
    """A store, and what measures the session in it; `state_format`: how states are stored, and `snapshot_tokens`: after
    more than so many tokens, packed; 0: with each turn, as it is.
    """

    store: SessionStore
    max_retained: int
    state_format: StateFormat = StateFormat.FP32
    snapshot_tokens: int = 0
    redis: Redis | None = None
    path: Path | None = None

    async def num_bytes(self) -> int:
        if self.redis is not None:
            keys = [key async for key in self.redis.scan_iter("nsm:{*.*}:*")]
            return sum([await self.redis.memory_usage(key, samples=0) for key in keys])
        if self.path is None:
            raise RuntimeError("a place is a file or a server")
        return sum(file.stat().st_size for file in self.path.parent.glob("sessions.db*") if "ballast" not in file.name)


async def main() -> None:
    args = parse_args()
    torch.set_num_threads(args.threads)
    backend = LocalBackend(load_checkpoint(MEASURED_MODEL), EngineConfig())
    await backend.start()
    try:
        with tempfile.TemporaryDirectory(dir=args.dir) as directory:
            rows = await measure(backend, Path(directory), args)
    finally:
        await backend.stop()
    show(rows, backend.model.state_bytes)
    fields = {
        "benchmark": "session_rewind",
        "commit": source_commit(),
        "device": platform.machine(),
        "num_cores": os.cpu_count(),
        "threads": args.threads,
        "torch": torch.__version__,
        "turns": args.turns,
        "turn_tokens": args.turn_tokens,
        "snapshot_tokens": args.snapshot_tokens,
        "state_bytes": backend.model.state_bytes,
        "rows": rows,
    }
    print(json.dumps(fields))


async def measure(backend: LocalBackend, directory: Path, args: argparse.Namespace) -> list[dict[str, Any]]:
    ids = book_ids(backend, args.turns * args.turn_tokens)
    async with contextlib.AsyncExitStack() as stack:
        cases = [
            await stack.enter_async_context(open_case(directory, max_retained, snapshot_tokens=args.snapshot_tokens))
            for open_case in ((sqlite_case, redis_case) if args.redis else (sqlite_case,))
            for max_retained in args.kept
        ]
        await run_turns(backend, cases, ids, args)
        sizes = {(case.max_retained, case.redis is None): await case.num_bytes() for case in cases}
        newest = (await cases[0].store.get(KEY)).position
        rows = []
        for max_retained in args.kept:
            case = next(case for case in cases if case.max_retained == max_retained and case.path is not None)
            found = await case.store.list_retained(KEY)
            row: dict[str, Any] = {
                "kept": max_retained,
                "distances": [newest - one.position for one in found],
                "retained_bytes": sum(one.num_bytes for one in found),
                "sqlite_bytes": sizes[max_retained, True],
                "redis_bytes": sizes.get((max_retained, False)),
                "rewind_s": {},
            }
            rows.append(row)
    for row in rows:
        for distance in DISTANCES:
            if distance < len(ids) and (row["kept"] or distance == WITHOUT):
                row["rewind_s"][distance] = await rewind(backend, directory, row["kept"], ids, distance)
    return rows


def book_ids(backend: LocalBackend, num_tokens: int) -> tuple[int, ...]:
    ids: list[int] = []
    while len(ids) < num_tokens:
        for document in read_documents(Path("data/books-sample"), "train"):
            ids += [backend.tokenizer.end_of_text_id, *backend.tokenizer.encode(document.text)]
    return tuple(ids[:num_tokens])


@contextlib.asynccontextmanager
async def sqlite_case(
    directory: Path, max_retained: int, state_format: StateFormat = StateFormat.FP32, *, snapshot_tokens: int = 0
) -> AsyncIterator[StoreCase]:
    path = directory / f"kept-{max_retained}" / "sessions.db"
    store = SqliteSessionStore(path)
    await store.open()
    try:
        yield StoreCase(store, max_retained, state_format, snapshot_tokens, path=path)
    finally:
        await store.close()


@contextlib.asynccontextmanager
async def redis_case(
    directory: Path, max_retained: int, state_format: StateFormat = StateFormat.FP32, *, snapshot_tokens: int = 0
) -> AsyncIterator[StoreCase]:
    data = directory / f"redis-{max_retained}"
    data.mkdir(parents=True)
    async with redis_store(data, "everysec") as (store, client):
        yield StoreCase(store, max_retained, state_format, snapshot_tokens, redis=client)


async def run_turns(
    backend: LocalBackend, cases: Sequence[StoreCase], ids: tuple[int, ...], args: argparse.Namespace
) -> None:
    """The same session in every place, turn by turn: each as a committed turn leaves it."""
    metrics = Metrics(backend)
    leases = [
        Leases(
            case.store, lease_s=60.0, metrics=metrics, max_retained=case.max_retained, state_format=case.state_format
        )
        for case in cases
    ]
    for case in cases:
        await case.store.create(NewSession(key=KEY, model_fingerprint=backend.model.fingerprint, metadata={}))
    part = PART_TURNS * args.turn_tokens
    resume: Resume | None = None
    for start in range(0, len(ids), part):
        request = GenerationRequest(
            request_id=f"part-{start}",
            prompt_ids=ids[start : start + part],
            sampling=SamplingParams(max_tokens=1, temperature=0.0, seed=0, ignore_eos=True),
            resume=resume,
            keep_states_at=tuple(range(args.turn_tokens, len(ids[start : start + part]) + 1, args.turn_tokens)),
        )
        async for event in backend.submit(request).events():
            if isinstance(event, PromptState):
                new_ids = ids[event.position - args.turn_tokens : event.position]
                for case, lease in zip(cases, leases, strict=True):
                    held = await lease.take(KEY, on_lost=lambda error: None)
                    await commit(backend, held, event, new_ids, snapshot_tokens=case.snapshot_tokens)
                resume = resume_from(backend, event)
            elif isinstance(event, Finished) and event.error is not None:
                raise event.error


def resume_from(backend: LocalBackend, event: PromptState) -> Resume:
    return Resume(
        state=event.state, position=event.position, fingerprint=backend.model.fingerprint, generated_counts={}
    )


async def commit(
    backend: LocalBackend, held: HeldLease, event: PromptState, new_ids: tuple[int, ...], *, snapshot_tokens: int
) -> None:
    head = held.stored.head
    version, is_due = head.version, event.position - head.snapshot_position > snapshot_tokens
    snapshot = snapshot_of(
        backend, event.state, position=event.position, version=version + 1, state_format=held.state_format
    )
    await held.commit(
        Commit(
            expected_version=version,
            snapshot=snapshot.encode(is_packed=snapshot_tokens > 0) if is_due else None,
            position=event.position,
            model_fingerprint=backend.model.fingerprint,
            new_ids=new_ids,
            num_sampled=len(new_ids) // 2,
            seed=0,
        )
    )


def snapshot_of(
    backend: LocalBackend, state: bytes, *, position: int, version: int, state_format: StateFormat = StateFormat.FP32
) -> Snapshot:
    header = SnapshotHeader(
        model_fingerprint=backend.model.fingerprint,
        numerics=backend.model.numerics,
        tokenizer_fingerprint=backend.tokenizer.fingerprint,
        layout=backend.model.state_layout,
        stored_dtype=state_format.dtype,
        rounded_to=state_format.dtype,
        position=position,
        pending_id=None,
        sampler=SamplerState(seed=0, generated_counts={}),
        tenant=KEY.tenant,
        session_id=KEY.session_id,
        version=version,
        parent=version - 1,
        created_at=time.time(),
    )
    return Snapshot(header, state)


async def rewind(
    backend: LocalBackend, directory: Path, max_retained: int, ids: tuple[int, ...], distance: int
) -> dict[str, float]:
    """Back by `distance` tokens, in a copy of the file: the state found and read, and its commit."""
    path = directory / "rewound" / "sessions.db"
    shutil.rmtree(path.parent, ignore_errors=True)
    shutil.copytree(directory / f"kept-{max_retained}", path.parent)
    store = SqliteSessionStore(path)
    await store.open()
    try:
        held = await Leases(store, lease_s=600.0, metrics=Metrics(backend)).take(KEY, on_lost=lambda error: None)
        num_left = len(ids) - distance
        start = time.perf_counter()
        marks = await store.log_marks(KEY)
        reading = await read_up_to(
            backend,
            store,
            KEY,
            ids[: num_left - 1],
            retained=held.retained,
            marks=marks,
            request_id="rewind",
            deadline=1e12,
        )
        finished = reading.finished
        if finished.end_state is None:
            raise finished.error or RuntimeError("the log was not read")
        version = held.stored.head.version
        snapshot = snapshot_of(backend, finished.end_state.state, position=num_left - 1, version=version + 1)
        await held.rewind(
            Rewind(
                expected_version=version,
                snapshot=snapshot.encode(),
                position=num_left - 1,
                model_fingerprint=backend.model.fingerprint,
                num_log_tokens=num_left,
                num_sampled=0,
                seed=0,
            )
        )
        seconds = time.perf_counter() - start
    finally:
        await store.close()
    return {"seconds": round(seconds, 3), "tokens_read": num_left - 1 - finished.cached_tokens}


def show(rows: list[dict[str, Any]], state_bytes: int) -> None:
    print(f"a raw state has {state_bytes} bytes\n")
    print("kept  distances from the head      kept          sqlite/state  redis/state")
    for row in rows:
        redis = "-" if row["redis_bytes"] is None else f"{row['redis_bytes'] / state_bytes:.2f}"
        distances = ", ".join(map(str, row["distances"])) or "-"
        shares = (
            f"{row['retained_bytes'] / state_bytes:>12.2f}  {row['sqlite_bytes'] / state_bytes:>12.2f}  {redis:>11}"
        )
        print(f"{row['kept']:<4}  {distances:<28} {shares}")
    print("\nseconds (tokens read) to go back so many tokens")
    print("kept  " + " ".join(f"{distance:>16}" for distance in DISTANCES))
    for row in rows:
        cells = [row["rewind_s"].get(distance) for distance in DISTANCES]
        texts = ["-" if cell is None else f"{cell['seconds']:.2f} ({cell['tokens_read']})" for cell in cells]
        print(f"{row['kept']:<4}  " + " ".join(f"{text:>16}" for text in texts))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=None, help="where the files are made (default: a temporary place)")
    parser.add_argument("--turns", type=int, default=1_000)
    parser.add_argument("--turn-tokens", type=int, default=80)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--snapshot-tokens", type=int, default=SNAPSHOT_TOKENS)
    parser.add_argument("--kept", type=int, nargs="+", default=[0, 2, 4])
    parser.add_argument("--redis", action="store_true", help="also in a Redis that is started here")
    return parser.parse_args()


if __name__ == "__main__":
    asyncio.run(main())
