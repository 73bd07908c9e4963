"""Helps programs that start a client's own command."""

import os
import subprocess
import sys
from pathlib import Path

BIN = Path(sys.executable).parent


def run(*command, folder=None, **variables) -> str:
    """Standard output; raises with the last line of the log where the command fails."""
    environment = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", **variables}
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, cwd=folder, env=environment, timeout=400
    )
    sys.stderr.write(done.stdout + done.stderr)
    if done.returncode != 0:
        lines = (done.stderr or done.stdout).strip().splitlines()
        raise RuntimeError(lines[-1] if lines else f"exit status {done.returncode}")
    return done.stdout
