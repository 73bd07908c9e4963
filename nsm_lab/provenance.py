"""The origin of figures: model, machine, source, time."""

from __future__ import annotations

import dataclasses
import datetime
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from nsm_core.distribution import DISTRIBUTION, UNKNOWN_VERSION, version_of

PACKAGES = (DISTRIBUTION, "torch", "numpy", "tokenizers", "fastapi", "uvicorn", "orjson")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """The origin of an evaluation's figures."""

    model: str
    fingerprint: str
    num_parameters: int
    weight_format: str
    numerics: str
    device: str
    command: str
    commit: str | None  # None: not run from a checkout
    versions: Mapping[str, str]
    created: str  # UTC


def command_line() -> str:
    """The command that started this process, without its folder."""
    spec = sys.modules["__main__"].__spec__  # set when started by `python -m`
    program = [Path(sys.argv[0]).name] if spec is None else ["python", "-m", spec.name.removesuffix(".__main__")]
    return shlex.join([*program, *sys.argv[1:]])


def source_commit() -> str | None:
    """Short commit of the checkout this module lies in, with `-dirty` when files differ from it; None outside one."""
    try:
        # An installed copy may lie inside a checkout of something else, which does not track it.
        _git("ls-files", "--error-unmatch", Path(__file__).name)
        return _git("describe", "--always", "--dirty", "--abbrev=12", "--exclude=*")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(*arguments: str) -> str:
    directory = Path(__file__).parent
    command = ["git", *arguments]  # whichever one has in the path
    done = subprocess.run(command, cwd=directory, capture_output=True, check=True, text=True, timeout=10)
    return done.stdout.strip()


def versions() -> dict[str, str]:
    """Versions of Python and of the installed packages that figures depend on."""
    found = {name: version_of(name) for name in PACKAGES}
    installed = {name: version for name, version in found.items() if version != UNKNOWN_VERSION}
    return {"python": platform.python_version(), **installed}


def utc_now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def origin() -> dict[str, str]:
    """Command, commit and versions, as the reports of many small runs name them."""
    return {
        "command": command_line(),
        "commit": source_commit() or "unknown",
        "versions": ", ".join(f"{name} {version}" for name, version in versions().items()),
    }
