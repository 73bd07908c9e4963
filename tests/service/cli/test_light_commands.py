"""Commands that compute nothing start without the engine and the server; some without torch."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.service.cli.conftest import Nsm, id_of

RUN = """
import json, sys
from service.cli.commands import app
sys.argv = ["nsm", *sys.argv[1:]]
try:
    app()
except SystemExit as end:
    assert not end.code, end.code
print(json.dumps(sorted(sys.modules)))
"""


def modules_after(*args: str) -> set[str]:
    """Imported by a process of the command."""
    done = subprocess.run([sys.executable, "-c", RUN, *args], capture_output=True, text=True, check=True, timeout=100)
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize(
    ("args", "absent"),
    [
        (("info",), {"fastapi", "uvicorn", "nsm_core.engine.engine", "service.server"}),
        (("sessions", "states", "ID"), {"fastapi", "uvicorn", "nsm_core.engine.engine", "service.server"}),
        (("sessions", "log", "ID"), {"torch", "fastapi", "nsm_core.engine.engine"}),
        (("sessions", "show", "ID"), {"torch", "fastapi", "nsm_core.engine.engine"}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_command_without_computation_imports_no_engine(nsm: Nsm, args: tuple[str, ...], absent: set[str]) -> None:
    session_id = id_of(nsm("chat", "--max-tokens", 4, stdin="Hello").stderr)
    imported = modules_after(*(session_id if arg == "ID" else arg for arg in args))
    assert imported & absent == set()


def test_info_reads_no_weights_and_says_the_same_as_a_loaded_model(nsm: Nsm) -> None:
    facts = json.loads(nsm("info", "--json").stdout)
    generated = json.loads(nsm("generate", "Hello", "--max-tokens", 2, "--json").stdout)
    assert facts["fingerprint"] == generated["model_fingerprint"]
    assert facts["state_bytes"] == sum(
        4 * _count(tensor["shape"]) for tensor in facts["state_layout"] if tensor["dtype"] == "float32"
    ) + 8 * sum(tensor["dtype"] == "int64" for tensor in facts["state_layout"])


def _count(shape: list[int]) -> int:
    return shape[0] * _count(shape[1:]) if shape else 1
