"""docs/security.md keeps its word: its tests are there, and nothing that serves can run what it reads."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "security.md").read_text("utf-8")
SERVES = ("nsm_core", "service", "nsm_lab", "model_repository")
# exec, unpacking of archives without checks, pickle and its kin, marshal, eval, yaml.load, a shell, torch.load
RULES = "S102,S202,S301,S302,S307,S506,S602,S604,S605,S609,TID251"
NAMES = ("pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "torch.load", "torch.save")
BANNED = ", ".join(f'"{name}" = {{ msg = "no" }}' for name in NAMES)
CONFIG = f"lint.flake8-tidy-imports.banned-api = {{ {BANNED} }}"
RUFF = ["-m", "ruff", "check", "--isolated", "--ignore-noqa", "--config", CONFIG, "--select", RULES]


def test_nothing_that_serves_can_run_what_it_reads() -> None:
    """Without the exceptions that pyproject.toml or a comment may make."""
    done = subprocess.run([sys.executable, *RUFF, *SERVES], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_check_itself_finds_what_is_forbidden(tmp_path: Path) -> None:
    bad = tmp_path / "bad.py"
    bad.write_text("import pickle\nimport torch\n\neval(input())  # noqa\ntorch.load('x')\npickle.loads(b'')  # noqa\n")
    done = subprocess.run([sys.executable, *RUFF, str(bad)], capture_output=True, text=True, check=False)
    assert [
        rule for rule in ("`pickle` is banned", "S307", "`torch.load` is banned", "S301") if rule not in done.stdout
    ] == []


def test_the_page_names_tests() -> None:
    assert len(named_tests()) > 20


def named_tests() -> list[tuple[str, str]]:
    return sorted(set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)))


@pytest.mark.parametrize(("path", "name"), named_tests(), ids=lambda value: Path(value).stem)
def test_every_test_that_the_page_names_is_there(path: str, name: str) -> None:
    tree = ast.parse((ROOT / path).read_text("utf-8"))
    functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    assert name in functions
