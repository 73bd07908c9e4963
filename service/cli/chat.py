"""`nsm chat`: a session that can be left and resumed."""

from __future__ import annotations

import asyncio
import contextlib
import shlex
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nsm_core.errors import EngineDead, NsmError, TurnCancelled
from service.cli import options
from service.cli.options import make_sampling
from service.cli.output import note, write_text

if TYPE_CHECKING:
    from nsm_core.sampling.params import SamplingParams
    from service.cli.conversation import Conversation
    from service.settings import Settings

PROMPT = "you> "
HELP = "/info: where the session is   /exit or Ctrl-D: leave   Ctrl-C: end an answer"

SessionId = Annotated[
    str | None, typer.Option("--session", show_default=False, help="Session to resume, or the id of a new one.")
]


def chat(
    session: SessionId = None,
    model: options.Model = None,
    device: options.Device = None,
    data_dir: options.DataDir = None,
    store: options.Store = None,
    max_tokens: options.MaxTokens = 256,
    temperature: options.Temperature = options.TEMPERATURE,
    top_p: options.TopP = options.TOP_P,
    top_k: options.TopK = 0,
    min_p: options.MinP = 0.0,
    repetition_penalty: options.RepetitionPenalty = options.REPETITION_PENALTY,
    seed: options.Seed = None,
) -> None:
    """Talk in a session that you can leave and resume.

    It needs no server and shares the server's store. Every answer is committed when it ends. Without a terminal each
    line of standard input is a message.
    """
    from service.settings import load_settings

    sampling = make_sampling(
        seed=seed,
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
    )
    flags = {"model": model, "device": device, "data_dir": data_dir, "store": store}
    _chat(load_settings(**flags), session, sampling, has_own_seed=seed is not None, flags=flags)


def _chat(
    settings: Settings,
    session_id: str | None,
    sampling: SamplingParams,
    *,
    has_own_seed: bool,
    flags: Mapping[str, Path | str | None],
) -> None:
    from service.cli.conversation import opened

    context = opened(settings, session_id=session_id, sampling=sampling, has_own_seed=has_own_seed)
    with asyncio.Runner() as runner:
        stack = contextlib.AsyncExitStack()
        try:
            conversation = runner.run(stack.enter_async_context(context))
            resume_command = None if settings.store == "memory" else _resume_command(flags, conversation.session_id)
            Chat(runner, conversation, resume_command).run()
        finally:
            runner.run(stack.aclose())


def _resume_command(flags: Mapping[str, Path | str | None], session_id: str) -> str:
    """The command that finds the same store, model and session again; a password is not repeated."""
    shown = {name: str(value) for name, value in flags.items() if value is not None and "@" not in str(value)}
    given = [(f"--{name.replace('_', '-')}", value) for name, value in shown.items()]
    return shlex.join(["nsm", "chat", *(word for pair in given for word in pair), "--session", session_id])


class Chat:
    """The loop between a person, or a file of messages, and a conversation."""

    def __init__(self, runner: asyncio.Runner, conversation: Conversation, resume_command: str | None) -> None:
        self._runner = runner
        self._conversation = conversation
        self._resume_command = resume_command
        self._is_interactive = sys.stdin.isatty()

    def run(self) -> None:
        self._greet()
        try:
            for line in self._lines():
                if line == "/exit":
                    break
                self._obey(line)
        finally:
            self._part()

    def _lines(self) -> Iterator[str]:
        """Typed lines without blank ones; without a terminal every line of standard input is a message."""
        if self._is_interactive:
            import readline  # noqa: F401  # line editing and history for `input`
        with contextlib.suppress(EOFError, KeyboardInterrupt):
            while True:
                line = input(PROMPT) if self._is_interactive else _read_line()
                if line.strip():
                    yield line.strip()
        if self._is_interactive:
            print()

    def _obey(self, line: str) -> None:
        if line == "/help":
            note(HELP)
        elif line == "/info":
            self._print_position()
        elif line.startswith("/"):
            note(f"no such command: {line}; {HELP}")
        else:
            self._say(line)

    def _say(self, message: str) -> None:
        try:
            self._runner.run(self._conversation.say(message, show=write_text))
        except (KeyboardInterrupt, TurnCancelled):
            note("\nstopped; this turn was not saved")
            if not self._is_interactive:
                raise KeyboardInterrupt from None
        except NsmError as error:
            if not self._is_interactive or isinstance(error, EngineDead):
                raise
            note(f"nsm: {error}")
        else:
            write_text("\n\n" if self._is_interactive else "\n")

    def _greet(self) -> None:
        head = self._conversation.head
        if head is None:
            note(f"new session {self._conversation.session_id}; {HELP}")
            return
        note(f"session {head.session_id} at position {head.position}, version {head.version}; {HELP}")
        last = self._runner.run(self._conversation.last_exchange())
        if last is not None:
            note(f"{PROMPT}{last.message}\n{last.answer}")

    def _print_position(self) -> None:
        head = self._conversation.head
        version, position, num_bytes = (head.version, head.position, head.snapshot_bytes) if head else (0, 0, 0)
        summary = f"version {version}, position {position}, {num_bytes} bytes"
        note(f"session {self._conversation.session_id}: {summary}")

    def _part(self) -> None:
        head = self._conversation.head
        if head is None or (head.version == 0 and self._conversation.is_new):
            note("no turns; no session was saved")
        elif self._resume_command is None:
            note("the session was in this process's memory, and ends with it")
        else:
            note(f"session {head.session_id} is at position {head.position}; resume it with\n  {self._resume_command}")


def _read_line() -> str:
    """Strict in every locale: a byte that is not UTF-8 is an error, as in `nsm generate -`."""
    line = sys.stdin.buffer.readline()
    if not line:
        raise EOFError
    return line.decode("utf-8")
