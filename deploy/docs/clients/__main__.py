"""Writes docs/clients.md: unmodified clients against a server that it starts. `python -m deploy.docs.clients`

Each client is installed in an environment of its own under build/clients, at the version that clients.toml names, and
its program in programs/ is run. Nothing in the table is written by hand.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
HERE = Path(__file__).parent
PROGRAMS = HERE / "programs"
BUILD = ROOT / "build" / "clients"
PAGE = ROOT / "docs" / "clients.md"
BIN = Path(sys.executable).parent
MODEL = "pulse-books-small"
MODEL_FOLDER = ROOT / "nsm_core" / "model" / "checkpoints" / MODEL
START_S = 120.0
PROGRAM_S = 600.0
HEAD = """# Clients

These clients work with a server without changes. `python -m deploy.docs.clients` installs each one, runs its
[program](../deploy/docs/clients) against `nsm serve`, and writes this page.

| client | version | works | does not |
| --- | --- | --- | --- |
"""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One client and its result. `checks`: each feature that was tried, with its problem or None."""

    name: str
    kind: str
    version: str
    checks: tuple[tuple[str, str | None], ...]

    def line(self) -> str:
        works = ", ".join(name for name, problem in self.checks if problem is None)
        fails = "; ".join(f"{name}: {cell(problem)}" for name, problem in self.checks if problem is not None)
        return f"| {self.name} ({self.kind}) | {self.version} | {works} | {fails} |"


def cell(text: str) -> str:
    """As it can stand in a table."""
    return "`" + text.replace("|", "\\|").replace("`", "'") + "`"


def read_clients() -> list[dict[str, Any]]:
    """The entries of clients.toml."""
    return list(tomllib.loads((HERE / "clients.toml").read_text("utf-8"))["client"])


def measure(client: Mapping[str, Any], url: str, triton: str | None) -> Row:
    """Installs a client, and runs its program."""
    name, kind = client["name"], client["kind"]
    try:
        interpreter, version, programs = install(client)
    except (subprocess.CalledProcessError, OSError) as error:
        return Row(name=name, kind=kind, version="", checks=(("installation", str(error).splitlines()[0]),))
    if client.get("needs") == "triton" and triton is None:
        return Row(name=name, kind=kind, version=version, checks=(("all", "not run: `make triton` was not"),))
    command = [*interpreter, str(programs / client["program"]), url, MODEL, triton or ""]
    return Row(name=name, kind=kind, version=version, checks=tuple(run_program(command)))


def install(client: Mapping[str, Any]) -> tuple[list[str], str, Path]:
    """(the interpreter for its program, its version, the program's folder). Raises CalledProcessError or OSError."""
    if "tool" in client:
        reported = subprocess.run(client["tool"], check=True, capture_output=True, text=True).stdout
        found = re.search(r"\d+(\.\d+)+", reported)
        return [sys.executable], found[0] if found else "", PROGRAMS
    if "npm" in client:
        return install_npm(client["npm"])
    folder = BUILD / Path(client["program"]).stem
    python = folder / "bin" / "python"
    uv = str(BIN / "uv")
    if not python.exists():
        subprocess.run([uv, "venv", "-q", "--python", sys.executable, str(folder)], check=True)
    # --no-config: this project's overrides leave out packages that a client's own torch needs
    install = [uv, "pip", "install", "-q", "--no-config", "--python", str(python)]
    subprocess.run([*install, *client["pip"]], check=True)
    return [str(python)], client["pip"][0].partition("==")[2], PROGRAMS


def install_npm(packages: Sequence[str]) -> tuple[list[str], str, Path]:
    """Beside a copy of the programs: Node looks for packages from where a program lies."""
    folder = BUILD / "npm"
    folder.mkdir(parents=True, exist_ok=True)
    for program in PROGRAMS.glob("*.mjs"):
        shutil.copy(program, folder)
    quiet = ("--silent", "--no-audit", "--no-fund", "--prefix", str(folder))
    subprocess.run(["npm", "install", *quiet, *packages], check=True, capture_output=True)
    return ["node"], packages[0].rpartition("@")[2], folder


def run_program(command: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """The checks that the program printed; an early end of the program is a problem of its own."""
    environment = {**os.environ, "PYTHONPATH": str(PROGRAMS), "OPENAI_API_KEY": "none", "NO_PROXY": "127.0.0.1"}
    log = BUILD / (Path(command[-4]).stem + ".log")
    with log.open("w", encoding="utf-8") as errors:
        try:
            done = subprocess.run(
                command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment, timeout=PROGRAM_S
            )
        except subprocess.TimeoutExpired:
            yield "all", f"it took longer than {PROGRAM_S:.0f} s"
            return
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            reported = json.loads(line)
            yield reported["name"], reported["problem"]
    if done.returncode != 0:
        last = log.read_text("utf-8").strip().splitlines()
        yield "its program", last[-1][:160] if last else f"exit status {done.returncode}"


@contextlib.contextmanager
def serving(*command: str, ready: str) -> Iterator[None]:
    """A program of this checkout while it answers at `ready`."""
    BUILD.mkdir(parents=True, exist_ok=True)
    with (BUILD / f"{command[0]}.log").open("w", encoding="utf-8") as log:
        process = subprocess.Popen([str(BIN / "nsm"), *command], stdout=log, stderr=log)
        try:
            wait_until_ready(process, ready)
            yield
        finally:
            process.terminate()
            process.wait(60)


def wait_until_ready(process: subprocess.Popen[bytes], url: str) -> None:
    """Raises RuntimeError."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(urllib.error.URLError, ConnectionError), urllib.request.urlopen(url) as answer:
            if answer.status == 200:
                return
        time.sleep(0.5)
    raise RuntimeError(f"the server did not become ready at {url}; its log is in {BUILD}")


def main() -> None:
    """Rows on the terminal, and the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("programs", nargs="*", help="only these, such as openai_python.py; other rows stay")
    parser.add_argument("--port", type=int, default=8450)
    args = parser.parse_args()
    url = f"http://127.0.0.1:{args.port}"
    clients = [one for one in read_clients() if not args.programs or one["program"] in args.programs]
    needs_triton = any(one.get("needs") == "triton" for one in clients) and (BIN.parent / "triton").exists()
    serve = ("serve", "--port", str(args.port), "--store", "memory", "--model", MODEL)
    with contextlib.ExitStack() as stack:
        stack.enter_context(serving(*serve, ready=f"{url}/health/ready"))
        if needs_triton:
            ready = "http://127.0.0.1:8003/v2/health/ready"
            stack.enter_context(serving("triton", "serve", "--model", str(MODEL_FOLDER), ready=ready))
        rows = known_rows() if args.programs and PAGE.exists() else {}
        for client in clients:
            line = measure(client, url, "127.0.0.1:8001" if needs_triton else None).line()
            rows[line.split("|")[1].strip()] = line
            print(line, flush=True)
            write_page(rows)


def write_page(rows: Mapping[str, str]) -> None:
    """In the order of clients.toml."""
    order = [f"{one['name']} ({one['kind']})" for one in read_clients()]
    PAGE.write_text(HEAD + "\n".join(rows[name] for name in order if name in rows) + "\n", "utf-8")


def known_rows() -> dict[str, str]:
    """Those of the page, by client."""
    lines = [line for line in PAGE.read_text("utf-8").splitlines() if line.startswith("| ")][2:]
    return {line.split("|")[1].strip(): line for line in lines}


if __name__ == "__main__":
    main()
