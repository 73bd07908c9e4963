"""States packed without loss: `python -m benchmarks.state_packing`. A table, then one line of JSON.

States of the bundled models, and of a small RWKV-7 model with random weights, after `--tokens` tokens of a text, packed
as snapshots are (`nsm_core/state/packing.py`) and by zstd without byte planes. Milliseconds are of CPU, of one thread.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import statistics
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TypeVar

import torch
import zstandard

from nsm_core.config import EngineConfig
from nsm_core.model.loader import load_checkpoint
from nsm_core.rwkv7.files import Rwkv7Files
from nsm_core.rwkv7.loader import loaded_from
from nsm_core.state.packing import LEVEL, pack_state, unpack_state
from nsm_core.tokenizer import Tokenizer
from nsm_lab.provenance import command_line, source_commit
from service.backends.local import LocalBackend
from service.state.prefill import read_again
from tests.support.rwkv7 import random_tensors, small_config

TEXT = Path(__file__).parent.parent / "README.md"
MODELS = ("pulse-books", "pulse-books-keyed")
ROUNDS = 5
Result = TypeVar("Result")


async def state_after(backend: LocalBackend, num_tokens: int) -> bytes:
    """The state of a started backend after so many tokens of the README, which is said again where it is too short."""
    ids = backend.tokenizer.encode(TEXT.read_text("utf-8"))
    fed = tuple(ids * (num_tokens // len(ids) + 1))[:num_tokens]
    deadline = time.monotonic() + 600.0
    finished = await read_again(backend, fed, request_id=f"state-{num_tokens}", deadline=deadline)
    if finished.end_state is None:
        raise RuntimeError("the engine gave no state")
    return finished.end_state.state


async def states(lengths: list[int]) -> AsyncIterator[tuple[str, bytes]]:
    """Names and states."""
    backends = {name: LocalBackend(load_checkpoint(Path(name)), EngineConfig()) for name in MODELS}
    backends["rwkv7, random"] = random_rwkv7(next(iter(backends.values())).tokenizer)
    for name, backend in backends.items():
        await backend.start()
        for num_tokens in lengths:
            yield f"{name}, {num_tokens} tokens", await state_after(backend, num_tokens)
        await backend.stop()


def random_rwkv7(tokenizer: Tokenizer) -> LocalBackend:
    """Eight layers of 512, with random weights."""
    config = small_config(vocab_size=tokenizer.vocab_size, width=512, num_layers=8, head_size=64, hidden=1024)
    files = Rwkv7Files(
        config=config,
        tensors=random_tensors(config),
        tokenizer=tokenizer,
        chat_template="plain-v1",
        weight_format="int8",
        fingerprint="random",
        name="random",
        created=0,
    )
    return LocalBackend(loaded_from(files, torch.device("cpu")), EngineConfig())


def measured(work: Callable[[], Result]) -> tuple[float, Result]:
    """Milliseconds of CPU, the median of several rounds."""
    times, result = [], work()
    for _ in range(ROUNDS):
        started = time.thread_time()
        result = work()
        times.append(1000 * (time.thread_time() - started))
    return statistics.median(times), result


def row(name: str, state: bytes) -> dict[str, float | str]:
    pack_ms, packed = measured(lambda: pack_state(state))
    unpack_ms, unpacked = measured(lambda: unpack_state(packed, num_bytes=len(state)))
    if unpacked != state:
        raise RuntimeError("a state did not come out as it was")
    plain_ms, plain = measured(lambda: zstandard.ZstdCompressor(level=LEVEL).compress(state))
    return {
        "state": name,
        "mb": round(len(state) / 1e6, 2),
        "left": round(len(packed) / len(state), 3),
        "pack_ms": round(pack_ms, 1),
        "unpack_ms": round(unpack_ms, 1),
        "left_without_planes": round(len(plain) / len(state), 3),
        "without_planes_ms": round(plain_ms, 1),
    }


async def measure(lengths: list[int]) -> list[dict[str, float | str]]:
    return [row(name, state) async for name, state in states(lengths)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 4000])
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = asyncio.run(measure(args.tokens))
    print(f"$ {command_line()}")
    for name in rows[0]:
        print(f"{name:<22}" + "".join(f"{one[name]!s:>32}" for one in rows))
    print(
        json.dumps(
            {"benchmark": "state_packing", "commit": source_commit(), "device": platform.machine(), "rows": rows}
        )
    )


if __name__ == "__main__":
    main()
