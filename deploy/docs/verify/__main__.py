"""Runs the commands of the pages and compares what they print, their options and their figures: `make verify-docs`.

Each page has a folder, a home and a port of its own. A command that is not run is listed with its reason, and its
options are held against the program's help. The exit code is 1 when something is stale or fails.
"""

from __future__ import annotations

import argparse
import dataclasses
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from deploy.docs.verify.blocks import Step, steps_of
from deploy.docs.verify.commands import options_of, why_not, without_comment
from deploy.docs.verify.compare import stale_lines
from deploy.docs.verify.figures import read_figures, stale_figures
from deploy.docs.verify.shell import ROOT, Shell

LIMIT_S = 180.0
SERVER = ("make serve", "nsm serve", ".venv/bin/nsm serve")
READY = "until curl -sf 127.0.0.1:{port}/health/ready > /dev/null; do kill -0 $! || break; sleep 0.3; done"
STOP = '[ -n "$PAGE_SERVER" ] && kill $PAGE_SERVER && wait $PAGE_SERVER 2> /dev/null; PAGE_SERVER='
CTRL_C = "^C"
FRAGMENTS = ("NameError", "FileNotFoundError")  # of a block that needs what the reader has
INDENT = "\n      "


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """`kind`: ok, stale, failed or not run."""

    step: Step
    kind: str
    details: str = ""

    def __str__(self) -> str:
        command = without_comment(self.step.command).strip().splitlines()[0][:90]
        return f"{self.kind:<8} {self.step.location}: {command}" + (f"{INDENT}{self.details}" if self.details else "")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m deploy.docs.verify", description=__doc__)
    parser.add_argument("--page", action="append", help="a page's file name; several times for several; all by default")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="seconds that a command may take")
    parser.add_argument("--figures", action="store_true", help="the figures alone, which run nothing")
    args = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends the shells, and what they started
    outcomes = [] if args.figures else [outcome for page in pages(args.page) for outcome in verify(page, args.limit_s)]
    figures = read_figures()
    stale = list(stale_figures(figures))
    for line in stale:
        print(f"stale    {line}")
    kinds = [outcome.kind for outcome in outcomes]
    counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in ("ok", "stale", "failed", "not run"))
    print(f"commands: {counts}; figures: {len(figures) - len(stale)} ok, {len(stale)} stale")
    return int(bool(stale) or "stale" in kinds or "failed" in kinds)


def pages(names: Sequence[str] | None) -> list[Path]:
    every = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "deploy").rglob("*.md"))]
    return [path for path in every if not names or path.name in names]


def verify(path: Path, limit_s: float) -> Iterator[Outcome]:
    """Every step of a page that readers see, as it ends."""
    steps = list(steps_of(path, str(path.relative_to(ROOT))))
    if not steps:
        return
    with tempfile.TemporaryDirectory() as folder, Shell(Path(folder)) as shell:
        if needs_server(steps):
            started = f"nsm serve 2> page-server.log & PAGE_SERVER=$!; {READY.format(port=shell.port)}"
            shell.run(started, limit_s=limit_s)
        for step in steps:
            outcome = attempt(step, shell, limit_s)
            if not step.is_hidden:
                print(outcome, flush=True)
                yield outcome


def needs_server(steps: Sequence[Step]) -> bool:
    """Whether the page asks a server that it does not start before."""
    for step in steps:
        if step.command.startswith(SERVER):
            return False
        if ":8000" in step.command and not why_not(step.command):
            return True
    return False


def attempt(step: Step, shell: Shell, limit_s: float) -> Outcome:
    try:
        return run(step, shell, limit_s)
    except TimeoutError as error:
        shell.start()
        return Outcome(step, "failed", str(error))


def run(step: Step, shell: Shell, limit_s: float) -> Outcome:
    """Raises TimeoutError."""
    if step.file:
        (shell.folder / step.file).write_text(shell.as_run(step.command))
        return Outcome(step, "ok")
    if step.language == "python":
        return Outcome(step, "not run", step.reason) if step.reason else run_python(step, shell, limit_s)
    reason = "" if step.is_hidden else step.reason or why_not(step.command)
    if reason:
        return check_options(step, shell, reason, limit_s)
    command = shell.as_run(without_comment(step.command))
    if command.startswith(SERVER):
        shell.run(STOP, limit_s=limit_s)
        if "&" not in command:
            return run_server(step, command, shell, limit_s)
    status, printed = shell.run(command, limit_s=limit_s)
    return judge(step, shell, status, printed)


def judge(step: Step, shell: Shell, status: int, printed: str) -> Outcome:
    stale = stale_lines(step.shown, shell.as_shown(printed))
    if stale:
        return Outcome(step, "stale", INDENT.join(stale))
    if status and not step.shown:
        return Outcome(step, "failed", f"status {status}: {printed.strip()[-300:]}")
    return Outcome(step, "ok")


def run_server(step: Step, command: str, shell: Shell, limit_s: float) -> Outcome:
    """In the background, until the page starts another one: a reader would have it in a second terminal."""
    port = command.partition("--port ")[2].split()[0] if "--port " in command else str(shell.port)
    program = command.replace("make serve", "nsm serve")  # which is what that target runs, as its own child
    started = f"{program} > page-server.log 2>&1 & PAGE_SERVER=$!; {READY.format(port=port)}"
    status, _ = shell.run(started, limit_s=limit_s)
    if CTRL_C in step.shown:
        shell.run(STOP, limit_s=limit_s)
        step = dataclasses.replace(step, shown=tuple(line for line in step.shown if line != CTRL_C))
    _, printed = shell.run("cat page-server.log", limit_s=limit_s)
    return judge(step, shell, status, printed)


def run_python(step: Step, shell: Shell, limit_s: float) -> Outcome:
    (shell.folder / "block.py").write_text(shell.as_run(step.command))
    status, printed = shell.run("python block.py", limit_s=limit_s)
    last = printed.strip().rpartition("\n")[2]
    if status and last.startswith(FRAGMENTS):
        return Outcome(step, "not run", f"a fragment ({last[:80]})")
    return Outcome(step, "failed" if status else "ok", last[:200] if status else "")


def check_options(step: Step, shell: Shell, reason: str, limit_s: float) -> Outcome:
    """Without running it: does the program have these options?"""
    known = options_of(step.command)
    if known is None:
        return Outcome(step, "not run", reason)
    _, text = shell.run(f"{known.program} --help", limit_s=limit_s)
    unknown = [option for option in known.options if option not in text]
    if unknown:
        return Outcome(step, "stale", f"{known.program} has no option {', '.join(unknown)}")
    return Outcome(step, "not run", f"{reason}; its options exist")


if __name__ == "__main__":
    sys.exit(main())
