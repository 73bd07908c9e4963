"""The repository keeps its own rules: the layout of the house, the lock file, what a wheel carries."""

from __future__ import annotations

import ast
import importlib.metadata
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
from hatchling.builders.wheel import WheelBuilder
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from nsm_core.execution.native.build import library_path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted(path for package in ("nsm_core", "service", "nsm_lab") for path in (ROOT / package).rglob("*.py"))
LOCK = (ROOT / "requirements.lock").read_text("utf-8")
MAX_LINES = 600  # a split needs a name before it needs a line count


def locked_versions() -> dict[str, str]:
    return dict(re.findall(r"^([a-z0-9-]+)==(\S+)", LOCK, re.MULTILINE))


def test_package_inits_are_empty() -> None:
    """Importing one room must not import its neighbours; only an op's package chooses among its implementations."""
    inits = [path for path in SOURCES if path.name == "__init__.py" and path.parent.parent.name != "ops"]
    assert [str(path) for path in inits if path.read_text("utf-8").strip()] == []


def test_every_source_folder_is_a_package() -> None:
    folders = {path.parent for path in SOURCES}
    assert sorted(str(folder) for folder in folders if not (folder / "__init__.py").exists()) == []


def test_no_file_is_overcrowded() -> None:
    long = {str(path): n for path in SOURCES if (n := len(path.read_text("utf-8").splitlines())) > MAX_LINES}
    assert long == {}


def test_nothing_is_named_after_what_it_is_not() -> None:
    assert [str(path) for path in SOURCES if path.name == "utils.py"] == []
    managers = re.compile(r"^class \w+Manager\b", re.MULTILINE)
    assert [str(path) for path in SOURCES if managers.search(path.read_text("utf-8"))] == []


def test_the_lock_names_no_place_and_leaves_torch_out() -> None:
    assert "://" not in LOCK
    gpu = {name for name in locked_versions() if name.startswith(("nvidia-", "cuda-")) or name == "torch"}
    assert gpu <= {"nvidia-ml-py"}  # reads a driver's counters, in plain Python


def test_every_locked_package_has_hashes() -> None:
    entries = re.split(r"^(?=[a-z0-9-]+==)", LOCK, flags=re.MULTILINE)[1:]
    assert len(entries) == len(locked_versions()) > 50
    assert [entry.split("==")[0] for entry in entries if "--hash=sha256:" not in entry] == []


def test_the_lock_satisfies_the_project() -> None:
    """After a change of dependencies: `make lock`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    wanted = [
        *project["dependencies"],
        *(line for extra in project["optional-dependencies"].values() for line in extra),
    ]
    locked = locked_versions()
    for requirement in map(Requirement, wanted):
        if requirement.name != "torch":
            version = locked.get(canonicalize_name(requirement.name))
            assert version is not None, f"{requirement} is not locked"
            assert requirement.specifier.contains(version, prereleases=True), f"{requirement} but {version} is locked"


def imported_names(path: Path) -> set[str]:
    """Top-level names of the modules that a file imports; optional imports (inside `try`) are left out."""
    tree = ast.parse(path.read_text("utf-8"))
    optional = {inner for node in ast.walk(tree) if isinstance(node, ast.Try) for inner in ast.walk(node)}
    names = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import) and node not in optional
        for alias in node.names
    }
    names |= {
        node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node not in optional and node.module and not node.level
    }
    names |= set(re.findall(r'files\("(\w+)"\)', path.read_text("utf-8")))  # packages that are read as data
    return {name.partition(".")[0] for name in names}


def test_every_import_is_a_declared_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    declared = {canonicalize_name(Requirement(line).name) for line in project["dependencies"]}
    extras = {
        extra: {canonicalize_name(Requirement(line).name) for line in lines}
        for extra, lines in project["optional-dependencies"].items()
    }
    providers = importlib.metadata.packages_distributions()
    own = {"nsm_core", "service", "nsm_lab", *sys.stdlib_module_names}
    missing = {
        name: str(path.relative_to(ROOT))
        for path in SOURCES
        for name in imported_names(path) - own
        if not (declared | extras.get(extra_of(path) or "", set()))
        & {canonicalize_name(provider) for provider in providers.get(name, [])}
    }
    # starlette and pydantic_core are the public ground of fastapi and pydantic, and come with them; triton comes with
    # torch where there are GPUs, and the kernels that import it are loaded nowhere else; httptools comes with
    # uvicorn[standard], whose protocol for it is extended
    given = {"starlette", "pydantic_core", "triton", "httptools"}
    assert {name: path for name, path in missing.items() if name not in given} == {}


def extra_of(path: Path) -> str | None:
    """Of a module that is imported only where somebody asks for it, and says what to install otherwise."""
    if path.parent == ROOT / "service" / "backends" / "triton":
        return "triton"
    return "lab" if "nsm_lab" in path.parts else None


@pytest.mark.parametrize("package", ["nsm_core", "service", "nsm_lab"])
def test_a_wheel_carries_every_file_of_a_package(package: str) -> None:
    packed = {file.distribution_path for file in WheelBuilder(str(ROOT)).recurse_included_files()}
    made = {"__pycache__", "build"}  # where they are used
    files = (path for path in (ROOT / package).rglob("*") if path.is_file() and made.isdisjoint(path.parts))
    assert sorted(str(path.relative_to(ROOT)) for path in files if str(path.relative_to(ROOT)) not in packed) == []


def stand_in_compiler(path: Path) -> Path:
    """Makes each object empty, and the library a copy of the checkout's."""
    lines = (
        f"#!{sys.executable}",
        "import shutil, sys",
        f"source = {str(library_path())!r} if '-shared' in sys.argv else '/dev/null'",
        "shutil.copyfile(source, sys.argv[sys.argv.index('-o') + 1])",
    )
    path.write_text("\n".join(lines))
    path.chmod(0o755)
    return path


@pytest.mark.timeout(400)
@pytest.mark.parametrize("compiler", ["compiler", "stand-in"])
@pytest.mark.skipif(not library_path().exists(), reason="the kernels of this checkout are not built")
def test_X18_a_wheel_builds_its_own_kernels_and_then_says_what_the_checkout_says(tmp_path: Path, compiler: str) -> None:
    """By the command that the log of a server without kernels names. The stand-in hands out the checkout's library: it
    has the right name only if the wheel has the same sources.
    """
    (wheel,) = WheelBuilder(str(ROOT)).build(directory=str(tmp_path / "wheel"))
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    installed = {**os.environ, "PYTHONPATH": str(tmp_path / "site"), "NSM_STORE": "memory"}
    if compiler == "stand-in":
        installed["CXX"] = str(stand_in_compiler(tmp_path / "c++"))

    def run(*command: str, **where: Any) -> str:
        command = (sys.executable, *command)
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=300, **where).stdout

    run("-P", "-m", "nsm_core.execution.native.build", cwd=tmp_path, env=installed)
    (built,) = (tmp_path / "site").glob("nsm_core/execution/native/build/libnsm-*.so")
    assert built.name == library_path().name
    say = ("-P", "-c", "from service.cli.main import main; main()", "generate", "It was", "--max-tokens=12", "--seed=7")
    text = run(*say, cwd=tmp_path, env=installed)
    assert text == run(*say, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT), "NSM_STORE": "memory"})
    assert len(text) > 8
