"""Tries a grammar in a process of its own before this one compiles it: some take minutes and gigabytes, by intent.

The library bounds most of its work, but not all of it, and it cannot be interrupted. So the process is
killed when a grammar takes too long, and has a limit of memory.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import resource
import select
import subprocess
import sys
import threading
import time
from typing import IO

from nsm_core.errors import InvalidRequest
from nsm_core.grammars.grammar import Grammar
from nsm_core.tokenizer import Tokenizer

START_TIMEOUT_S = 60.0  # of the process, which loads the vocabulary
TRIAL_TIMEOUT_S = 5.0
MEMORY_BYTES = 256 * 1024 * 1024  # that a grammar may add
COMMAND = "from nsm_core.grammars.trial import main; main()"
READY = "ready"


class GrammarTrial:
    """One process, which lives until this one ends; started with the first grammar. Any thread may call it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer_json = tokenizer.to_json()
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def check(self, grammar: Grammar) -> None:
        """Raises InvalidRequest for a grammar that is refused, takes too long or too much memory."""
        with self._lock:
            process = self._running()
            try:
                reply = _ask(process, json.dumps(grammar.to_fields()), TRIAL_TIMEOUT_S)
            except (OSError, TimeoutError, EOFError) as error:
                self._kill()
                what = "too long" if isinstance(error, TimeoutError) else "too much memory"
                message = f"{grammar.param} cannot be used as a grammar: its compilation takes {what}"
                raise InvalidRequest(message, param=grammar.param, code="grammar_too_complex") from error
        if reply:
            raise InvalidRequest(**json.loads(reply))

    def close(self) -> None:
        """Ends the process; a later grammar starts another one."""
        with self._lock:
            self._kill()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self._kill()
        atexit.register(self.close)
        self._process = subprocess.Popen(
            [sys.executable, "-c", COMMAND], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        if _ask(self._process, self._tokenizer_json, START_TIMEOUT_S) != READY:
            raise OSError("the process that tries grammars does not start")
        return self._process

    def _kill(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):  # bytes that were not written yet
                    pipe.close()
        atexit.unregister(self.close)


def _ask(process: subprocess.Popen[bytes], line: str, timeout_s: float) -> str:
    """Writes a line and reads one. Raises TimeoutError, or OSError or EOFError when the process has ended."""
    if process.stdin is None or process.stdout is None:
        raise OSError("the process has no pipes")
    process.stdin.write(line.encode() + b"\n")
    process.stdin.flush()
    return _read_line(process.stdout, time.monotonic() + timeout_s)


def _read_line(pipe: IO[bytes], deadline: float) -> str:
    raw = b""
    while not raw.endswith(b"\n"):
        is_ready, _, _ = select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))
        if not is_ready:
            raise TimeoutError
        part = os.read(pipe.fileno(), 65536)
        if not part:
            raise EOFError
        raw += part
    return raw[:-1].decode()


def main() -> None:
    """The process: a tokenizer on the first line of its input, a grammar on each other; an answer for each."""
    from nsm_core.grammars.compiler import GrammarCompiler
    from nsm_core.tokenizer_files import tokenizer_from_json

    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    compiler = GrammarCompiler(tokenizer_from_json(requests.readline().decode()))
    compiler.matcher(Grammar(kind="regex", source="a"))  # loads the library and the vocabulary
    _limit_memory()
    answers.write(READY.encode() + b"\n")
    answers.flush()
    for line in requests:
        answer = ""
        try:
            compiler.check(Grammar.from_fields(json.loads(line)))
        except InvalidRequest as error:
            answer = json.dumps({"message": str(error), "param": error.param, "code": error.code})
        answers.write(answer.encode() + b"\n")
        answers.flush()


def _limit_memory() -> None:
    with contextlib.suppress(OSError, ValueError):  # a system without /proc, or with a lower limit
        with open("/proc/self/statm") as file:
            num_pages = int(file.read().split()[0])
        limit = num_pages * os.sysconf("SC_PAGE_SIZE") + MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
