"""A child process tells its supervisor, by one line on a pipe, that it is ready or why its start failed."""

from __future__ import annotations

import asyncio
import json
import os
from dataclasses import asdict, dataclass

from nsm_core.errors import NsmError

MAX_CHARS = 1000  # of a reason: the line fits into any pipe


@dataclass(frozen=True, slots=True)
class StartReport:
    """`failure`: in one line; None of a process that is ready. `is_final`: another start would end in the same way."""

    failure: str | None = None
    is_final: bool = False


class StartReporter:
    """The child's end. Only the first report counts."""

    def __init__(self, fd: int) -> None:
        """`fd`: for writing; it is closed with the report."""
        self._fd = fd
        self.has_reported = False

    def ready(self) -> None:
        self._report(StartReport())

    def failed(self, error: Exception, *, is_final: bool) -> None:
        text = error.with_notes() if isinstance(error, NsmError) else f"{type(error).__name__}: {error}"
        self._report(StartReport(" ".join(text.split())[:MAX_CHARS], is_final))

    def _report(self, report: StartReport) -> None:
        if self.has_reported:
            return
        self.has_reported = True
        try:
            os.write(self._fd, json.dumps(asdict(report)).encode() + b"\n")
        except BrokenPipeError:
            pass  # the supervisor is gone, and this process follows it
        os.close(self._fd)


async def read_report(fd: int) -> StartReport | None:
    """The supervisor's end, which it closes: waits for the report, None if the child ended without one."""
    reader = asyncio.StreamReader()
    pipe = os.fdopen(fd, "rb", buffering=0)
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
    try:
        line = await reader.readline()
    finally:
        transport.close()
    return StartReport(**json.loads(line)) if line.endswith(b"\n") else None
