"""What NSM_STATE_DTYPE saves and costs: `python -m benchmarks.state_dtype --redis`. Tables, then one line of JSON. More
than 15 minutes on two cores; `--turns 250 --texts 8` makes it a few.

pulse-books (or `--model`), text of data/books-sample, for each dtype of stored states:

- a snapshot: its bytes against those of the raw state; the time to encode and to decode it, the checksum included;
- a session of `--turns` turns with its log and `--kept` older snapshots: what it stores, and what that takes in SQLite
  (file size) or Redis (MEMORY USAGE of its keys), against the raw state. In fp32 states are packed and follow by policy
  (see benchmarks.session_rewind); rounded ones are stored with each turn;
- divergence: the next `--next` tokens of the text, read on from a state that was stored once after `--turn-tokens`
  tokens, and from one that was stored after each of `--saves` turns, against the run that never was. Differences of
  logits, KL divergence of the next token's distribution (nats), share of tokens whose likeliest next token is another.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.measured_model import MEASURED_MODEL
from benchmarks.session_rewind import KEY, SNAPSHOT_TOKENS, book_ids, redis_case, run_turns, snapshot_of, sqlite_case
from nsm_core.config import EngineConfig
from nsm_core.model.loader import LoadedNsm, load_checkpoint
from nsm_core.model.nsm import NsmModel
from nsm_core.state.quantize import StateFormat
from nsm_core.state.snapshot import Snapshot
from nsm_core.state.spec import State
from nsm_lab.evaluation.stored_state_quality import stored_state
from nsm_lab.provenance import command_line, source_commit
from service.backends.local import LocalBackend

NUM_TIMED = 20


async def main() -> None:
    args = parse_args()
    torch.set_num_threads(args.threads)
    loaded = load_checkpoint(args.model)
    backend = LocalBackend(loaded, EngineConfig())
    await backend.start()
    try:
        ids = book_ids(backend, max(args.turns * args.turn_tokens, args.texts * text_len(args)))
        snapshots = measure_snapshots(loaded, backend, ids, args)
        with tempfile.TemporaryDirectory(dir=args.dir) as directory:
            sessions = await measure_sessions(backend, Path(directory), ids[: args.turns * args.turn_tokens], args)
    finally:
        await backend.stop()
    divergence = measure_divergence(loaded.model, ids, args)
    show(snapshots, sessions, divergence, backend.model.state_bytes)
    fields = {
        "benchmark": "state_dtype",
        "command": command_line(),
        "commit": source_commit(),
        "model": loaded.name,
        "layers": loaded.config.layer_pattern,
        "device": platform.machine(),
        "num_cores": os.cpu_count(),
        "threads": args.threads,
        "torch": torch.__version__,
        "state_bytes": backend.model.state_bytes,
        "snapshots": snapshots,
        "sessions": sessions,
        "divergence": divergence,
    }
    print(json.dumps(fields))


def measure_snapshots(
    loaded: LoadedNsm, backend: LocalBackend, ids: tuple[int, ...], args: argparse.Namespace
) -> list[dict[str, Any]]:
    """Of the state after one of the texts; medians."""
    num_tokens = text_len(args)
    with torch.inference_mode():
        _, state = loaded.model(torch.tensor([ids[:num_tokens]]), loaded.model.initial_state(1))
    raw, rows = loaded.model.state_spec.pack(state), []
    for state_format in StateFormat:
        snapshot = snapshot_of(backend, raw, position=num_tokens, version=1, state_format=state_format)
        stored = snapshot.encode()
        rows.append(
            {
                "dtype": state_format.value,
                "bytes": len(stored),
                "encode_ms": median_ms(snapshot.encode),
                "decode_ms": median_ms(functools.partial(Snapshot.decode, stored)),
            }
        )
    return rows


def median_ms(call: Callable[[], object]) -> float:
    times = []
    for _ in range(NUM_TIMED):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return round(1000 * statistics.median(times), 2)


async def measure_sessions(
    backend: LocalBackend, directory: Path, ids: tuple[int, ...], args: argparse.Namespace
) -> list[dict[str, Any]]:
    """The same session in every dtype and with every number of older snapshots, each in a store of its own."""
    open_case = redis_case if args.redis else sqlite_case
    async with contextlib.AsyncExitStack() as stack:
        cases = [
            await stack.enter_async_context(
                open_case(
                    directory / state_format.value,
                    max_retained,
                    state_format,
                    snapshot_tokens=SNAPSHOT_TOKENS if state_format is StateFormat.FP32 else 0,
                )
            )
            for state_format in StateFormat
            for max_retained in args.kept
        ]
        await run_turns(backend, cases, ids, args)
        return [
            {
                "dtype": case.state_format.value,
                "kept": case.max_retained,
                "store": "redis" if args.redis else "sqlite",
                "stored_bytes": (await case.store.usage(tenant=KEY.tenant)).num_bytes,
                "store_bytes": await case.num_bytes(),
            }
            for case in cases
        ]


def measure_divergence(model: NsmModel, ids: tuple[int, ...], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Means over the texts, and the largest of all."""
    found: dict[tuple[int, StateFormat], list[dict[str, float]]] = {}
    for number in range(args.texts):
        text = torch.tensor([ids[number * text_len(args) : (number + 1) * text_len(args)]])
        with torch.inference_mode():
            for saves, state_format, exact, stored in stored_runs(model, text, args):
                found.setdefault((saves, state_format), []).append(differences(exact, stored))
    return [
        {"dtype": state_format.value, "saves": saves, "tokens": args.texts * args.next}
        | {name: (max if name.startswith("max") else statistics.fmean)(row[name] for row in rows) for name in rows[0]}
        for (saves, state_format), rows in found.items()
    ]


def stored_runs(
    model: NsmModel, text: Tensor, args: argparse.Namespace
) -> Iterator[tuple[int, StateFormat, Tensor, Tensor]]:
    """After the first save and after the last: the number of saves, the dtype, and the logits [N, V] of the tokens that
    follow, from the exact state and from the stored one.
    """
    state = model.initial_state(1)
    stored = {state_format: state for state_format in StateFormat if state_format is not StateFormat.FP32}
    for turn in range(1, args.saves + 1):
        part = text[:, (turn - 1) * args.turn_tokens : turn * args.turn_tokens]
        _, state = model(part, state)
        for state_format, before in stored.items():
            _, after = model(part, before)
            stored[state_format] = stored_state(model.state_spec, after, state_format)
        if turn in (1, args.saves):
            following = text[:, turn * args.turn_tokens :][:, : args.next]
            exact = logits_of(model, following, state)
            for state_format, after in stored.items():
                yield turn, state_format, exact, logits_of(model, following, after)


def logits_of(model: NsmModel, ids: Tensor, state: State) -> Tensor:
    hidden, _ = model(ids, state)
    return model.logits(hidden)[0].double()


def differences(exact: Tensor, stored: Tensor) -> dict[str, float]:
    apart = (exact - stored).abs()
    kl = F.kl_div(stored.log_softmax(-1), exact.log_softmax(-1), reduction="none", log_target=True).sum(-1)
    return {
        "max_logit": float(apart.max()),
        "mean_logit": float(apart.mean()),
        "kl": float(kl.mean()),
        "max_kl": float(kl.max()),
        "other_greedy": float((exact.argmax(-1) != stored.argmax(-1)).double().mean()),
    }


def text_len(args: argparse.Namespace) -> int:
    """Tokens of one text: all turns, and those that follow."""
    return int(args.saves * args.turn_tokens + args.next)


def show(
    snapshots: list[dict[str, Any]],
    sessions: list[dict[str, Any]],
    divergence: list[dict[str, Any]],
    state_bytes: int,
) -> None:
    print(f"a raw state has {state_bytes} bytes; sizes are shares of that\n")
    print(f"{'a snapshot':<12} {'stored':>8} {'encode, decode, ms':>20}")
    for row in snapshots:
        times = f"{row['encode_ms']:>12.1f} {row['decode_ms']:>7.1f}"
        print(f"{row['dtype']:<12} {row['bytes'] / state_bytes:>8.3f} {times}")
    print(f"\n{'a session':<12} {'kept':>8} {'stored':>8} {sessions[0]['store']:>8}")
    for row in sessions:
        shares = " ".join(f"{row[name] / state_bytes:>8.2f}" for name in ("stored_bytes", "store_bytes"))
        print(f"{row['dtype']:<12} {row['kept']:>8} {shares}")
    print(f"\n{'divergence':<12} {'saves':>8} {'max, mean |logit|':>20} {'mean, max KL':>20} {'other token':>12}")
    for row in divergence:
        logits = f"{row['max_logit']:>12.4f} {row['mean_logit']:>7.4f}"
        kl = f"{row['kl']:>11.2e} {row['max_kl']:>8.2e}"
        print(f"{row['dtype']:<12} {row['saves']:>8} {logits} {kl} {row['other_greedy']:>12.4f}")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=MEASURED_MODEL, help="model directory or name")
    parser.add_argument("--dir", type=Path, default=None, help="where the files are made (default: a temporary place)")
    parser.add_argument("--turns", type=int, default=1_000)
    parser.add_argument("--turn-tokens", type=int, default=80)
    parser.add_argument("--kept", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--texts", type=int, default=16)
    parser.add_argument("--saves", type=int, default=50)
    parser.add_argument("--next", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--redis", action="store_true", help="sessions in Redis servers that are started here (default: in SQLite)"
    )
    return parser.parse_args()


if __name__ == "__main__":
    asyncio.run(main())
