"""Load tests speak HTTP and gRPC, import neither package, and keep gevent to themselves."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted((ROOT / "loadtests").glob("*.py"))
MAX_LINES = 350


def imported_modules(path: Path) -> set[str]:
    nodes = list(ast.walk(ast.parse(path.read_text("utf-8"))))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return names | {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}


def reached_from(path: Path) -> set[str]:
    """Modules that are imported with it, those of loadtests followed."""
    reached, waiting = set[str](), [path]
    while waiting:
        for name in imported_modules(waiting.pop()) - reached:
            reached.add(name)
            if name.startswith("loadtests."):
                waiting.append(ROOT / f"{name.replace('.', '/')}.py")
    return reached


def top_level(names: set[str]) -> set[str]:
    return {name.partition(".")[0] for name in names}


def test_neither_package_is_imported() -> None:
    assert {
        path.name for path in SOURCES if top_level(imported_modules(path)) & {"nsm_core", "service", "nsm_lab", "tests"}
    } == set()


def test_no_file_is_overcrowded() -> None:
    assert {path.name for path in SOURCES if len(path.read_text("utf-8").splitlines()) > MAX_LINES} == set()


def test_B3_what_runs_beside_grpc_or_in_these_tests_has_no_gevent() -> None:
    entries = [ROOT / "loadtests" / name for name in ("__main__.py", "triton.py", "conclusion.py", "servers.py")]
    tests = sorted(Path(__file__).parent.glob("test_*.py"))
    for path in (*entries, *tests):
        assert not top_level(reached_from(path)) & {"gevent", "geventhttpclient", "locust"}, path
