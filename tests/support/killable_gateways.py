"""Gateways in processes of their own that start in a moment, to be killed often.

One process has everything imported and forks for each gateway. Run as a module it reads lines of its input, each JSON
with the fields of `Settings`, and answers each with a line: process id and port.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import torch

from nsm_core.tokenizer import BpeTokenizer, Tokenizer
from service.app import create_app
from service.settings import Settings
from service.stores.sessions.factory import make_store
from tests.support.live_server import serving
from tests.support.rwkv7 import rwkv7_backend

ROOT = Path(__file__).resolve().parents[2]


@dataclasses.dataclass(frozen=True, slots=True)
class Killable:
    """A gateway that serves at `url`."""

    process_id: int
    url: str

    def kill(self) -> None:
        os.kill(self.process_id, signal.SIGKILL)


class Nursery:
    """The process that forks."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def start(self, **settings: Any) -> Killable:
        """A gateway with these settings, when it serves."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(settings).encode() + b"\n")
        await self._process.stdin.drain()
        answer = json.loads(await self._process.stdout.readline())
        return Killable(answer["process_id"], answer["url"])


@contextlib.asynccontextmanager
async def nursery(tokenizer_file: Path) -> AsyncIterator[Nursery]:
    """Every gateway of it ends with it."""
    command = (sys.executable, "-m", "tests.support.killable_gateways", str(tokenizer_file))
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdin=pipe, stdout=pipe, start_new_session=True)
    try:
        yield Nursery(process)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


async def serve(tokenizer: Tokenizer, settings: dict[str, Any], answer: int) -> None:
    """Until it is killed."""
    wanted = Settings(prefix_cache_mb=0, **settings)
    app = create_app(wanted, rwkv7_backend(tokenizer), make_store(wanted))
    async with serving(app) as url:
        os.write(answer, json.dumps({"process_id": os.getpid(), "url": url}).encode() + b"\n")
        await asyncio.Event().wait()


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that are killed
    torch.set_num_threads(1)
    tokenizer = BpeTokenizer.load(Path(sys.argv[1]))
    for line in sys.stdin:
        if os.fork() == 0:
            try:
                asyncio.run(serve(tokenizer, json.loads(line), sys.stdout.fileno()))
            finally:
                os._exit(1)


if __name__ == "__main__":
    main()
