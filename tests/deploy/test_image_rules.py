"""The Dockerfile: by hadolint, and by what it promises of its images. Building them is for test_image.py."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = ROOT / "Dockerfile"
DOCKERFILES = [DOCKERFILE, ROOT / "tests" / "deploy" / "triton_stand_in" / "Dockerfile"]
LOCKS = ROOT / "deploy" / "image"
SERVE = ROOT / "scripts" / "serve.lock"
FINAL = ("gateway", "triton", "loadtest")


def stages() -> dict[str, str]:
    """Each stage's instructions, without comments, continued lines joined."""
    text = re.sub(r"^\s*#.*\n", "", DOCKERFILE.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    parts = re.split(r"^FROM (\S+) AS (\S+)\n", text, flags=re.MULTILINE)
    return {
        name: f"FROM {base}\n{body}" for base, name, body in zip(parts[1::3], parts[2::3], parts[3::3], strict=True)
    }


def entries(lock: Path) -> dict[str, str]:
    """Each package's line and hashes; comments, which say who wants it, left out."""
    text = "\n".join(line for line in lock.read_text().splitlines() if not line.strip().startswith("#"))
    return {
        entry.split("==")[0]: entry.strip() for entry in re.split(r"^(?=[a-z0-9.-]+==)", text, flags=re.MULTILINE)[1:]
    }


def lock_name(lock: Path) -> str:
    return str(lock.relative_to(ROOT))


@pytest.mark.parametrize("path", DOCKERFILES, ids=["images", "stand-in"])
def test_hadolint_finds_nothing(path: Path) -> None:
    hadolint = Path(sys.executable).parent / "hadolint"
    done = subprocess.run([hadolint, path], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", FINAL)
def test_final_stages_run_without_rights_say_what_they_are_and_are_asked_for_health(name: str) -> None:
    stage = stages()[name]
    assert re.findall(r"^USER (\S+)", stage, re.MULTILINE)[-1] == "10001:10001"
    assert "HEALTHCHECK" in stage
    assert "ENTRYPOINT [" in stage
    assert "org.opencontainers.image.title" in stage


@pytest.mark.parametrize("name", ["gateway", "loadtest"])
def test_no_compiler_is_in_an_image_whose_kernels_are_compiled(name: str) -> None:
    assert not re.search(r"\b(gcc|g\+\+|build-essential|python3-dev|pip)\b", stages()[name])


@pytest.mark.parametrize("name", FINAL)
def test_no_secret_is_in_an_image(name: str) -> None:
    assert not re.search(r"(?i)^(?:ARG|ENV).*(password|secret|token|api_key)", stages()[name], re.MULTILINE)


def test_what_is_copied_exists_and_nothing_else_is_sent_to_the_builder() -> None:
    copied = {
        source
        for stage in stages().values()
        for sources in re.findall(r"^COPY (?!--from)(.+) \S+$", stage, re.MULTILINE)
        for source in sources.split()
    }
    assert [source for source in copied if not (ROOT / source).exists()] == []
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert ignored[1] == "*"
    allowed = {line[1:] for line in ignored if line.startswith("!")} - {"deploy"}
    assert {
        source for source in copied if not any(source == one or source.startswith(f"{one}/") for one in allowed)
    } == set()
    assert {
        one for one in allowed if not any(source == one or source.startswith(f"{one}/") for source in copied)
    } == set()


def test_torch_is_the_makefiles() -> None:
    wanted = re.search(r"^TORCH_VERSION \?= (\S+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert wanted is not None
    assert set(re.findall(r"^ARG TORCH_VERSION=(\S+)", DOCKERFILE.read_text(), re.MULTILINE)) == {wanted[1]}


@pytest.mark.parametrize("lock", [LOCKS / "requirements.lock", LOCKS / "loadtest.lock", SERVE], ids=lock_name)
def test_images_and_make_serve_have_what_was_tested(lock: Path) -> None:
    """The same versions with the same hashes; after a change of dependencies: `make lock`."""
    tested, shipped = entries(ROOT / "requirements.lock"), entries(lock)
    assert {name: entry for name, entry in shipped.items() if tested.get(name) != entry} == {}
    assert {"fastapi", "redis", "tritonclient", "opentelemetry-sdk"} <= set(shipped)
    assert not {"mypy", "ruff", "torch", "triton"} & set(shipped)


@pytest.mark.parametrize("lock", [*sorted(LOCKS.glob("*.lock")), SERVE], ids=lock_name)
def test_locks_have_hashes_and_name_no_place(lock: Path) -> None:
    assert "://" not in lock.read_text()
    assert [name for name, entry in entries(lock).items() if "--hash=sha256:" not in entry] == []
